"""Tensor parallelism for an unchanged module: styles, a given or a found plan, and its numerical check."""
