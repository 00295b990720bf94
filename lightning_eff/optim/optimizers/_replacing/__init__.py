"""Assigns optimizers and learning rates to parameters, and creates an optimizer from its class path."""
