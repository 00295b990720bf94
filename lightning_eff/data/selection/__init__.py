"""Techniques that choose the samples of a step."""
