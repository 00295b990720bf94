"""Attention that is gated between content and position, in modules found by their calls."""
