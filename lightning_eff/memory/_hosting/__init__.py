"""Copies of tensors in host memory, on their way there and back."""
