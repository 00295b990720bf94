"""Layers of another kind, or beside those that are there."""
