"""Feed-forward networks some of whose hidden units are not there yet: where they lie, what a step computes, how they grow."""
