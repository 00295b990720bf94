"""Find parts of a network's architecture in an autograd graph: residual branches, attention, feed-forward networks, heads."""
