"""Divides the work of matrix optimizers over the ranks of a run."""
