"""Losses that are differentiated more than once."""
