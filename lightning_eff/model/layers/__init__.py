"""Techniques that change the layers of a module."""
