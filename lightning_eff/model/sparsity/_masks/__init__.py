"""Masks of weights: how they are chosen, changed and kept."""
