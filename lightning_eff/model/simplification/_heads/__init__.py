"""Nonlinear layers before the layer that computes a network's outputs."""
