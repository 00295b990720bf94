"""Initializations: the weights at step 0."""
