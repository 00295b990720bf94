"""The base of update rules that multiply a matrix from both sides."""
