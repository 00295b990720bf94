"""Losses that are differentiated several times."""
