"""Dropout of hidden units in regular patterns, which makes the products smaller."""
