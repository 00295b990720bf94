"""Finds the linear layers of queries, keys and values before the run, and replaces them."""
