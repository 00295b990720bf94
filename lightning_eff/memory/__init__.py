"""Memory between forward and backward: recomputation, offloading, compressed activations and optimizer states."""
