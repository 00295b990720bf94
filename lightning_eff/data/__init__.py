"""Techniques for the samples, tokens and lengths of a step, in a folder each, and for loading and resuming data."""
