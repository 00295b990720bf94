"""Dropout of hidden units by regular patterns, of which products are smaller."""
