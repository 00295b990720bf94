"""Activation functions, where modules have them, and feed-forward networks that are gated by one."""
