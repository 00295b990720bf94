"""Curricula: the length, size, difficulty and number of samples over the run."""
