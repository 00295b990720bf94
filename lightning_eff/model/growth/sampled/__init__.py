"""Techniques that train randomly drawn blocks."""
