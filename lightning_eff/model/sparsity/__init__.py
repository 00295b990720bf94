"""Techniques that keep weights at zero."""
