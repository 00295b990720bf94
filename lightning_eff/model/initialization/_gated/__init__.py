"""Attention that is gated between content and position, in modules that are found by their calls."""
