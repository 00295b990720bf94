"""Attention computed otherwise: exactly in less memory, sparsely, by random features, by hashing, or linearly."""
