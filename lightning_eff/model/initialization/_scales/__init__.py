"""Scales and scalars beside maps, which are learnt, and fold away."""
