"""Gradients taken elsewhere than at the weights."""
