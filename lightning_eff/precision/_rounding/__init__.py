"""Explanations of errors under stochastic rounding."""
