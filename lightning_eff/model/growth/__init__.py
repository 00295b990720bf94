"""Blocks that come and go: how many of them run at a step, and which."""
