"""What an autograd graph tells of a network's architecture: its residual branches and its heads."""
