"""Techniques that choose samples by what the run learns about them as it goes."""
