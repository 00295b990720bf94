"""Copies of tensors in host memory, in both directions."""
