"""Precision plugins: an unchanged module computes in fewer bits."""
