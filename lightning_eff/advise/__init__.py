"""Advice on a run: what makes it faster, what is worth a comparison, and what is wrong with it."""
