"""Compressed collectives, and the optimizers and DDP hooks that use them."""
