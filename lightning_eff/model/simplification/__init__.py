"""Switches that make a network simpler while it pretrains."""
