"""Learnt scales and scalars of layers, which can be folded away."""
