"""Weights that a strategy divides over the ranks: set before it does, or a piece at a time."""
