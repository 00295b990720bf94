"""Which of a chain's activations to keep, to recompute and to move to the host: solvers, prediction and pictures."""
