"""Matrices as products of two block-diagonal ones with permutations."""
