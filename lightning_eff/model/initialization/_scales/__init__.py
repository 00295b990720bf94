"""Learnt scales and scalars beside layers, which can be folded away."""
