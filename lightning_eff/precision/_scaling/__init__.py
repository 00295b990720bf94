"""Scaled float8: casts, products and the history of amax."""
