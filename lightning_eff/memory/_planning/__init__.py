"""Plans that keep, recompute or offload the activations of a chain: solvers, predictions and plots."""
