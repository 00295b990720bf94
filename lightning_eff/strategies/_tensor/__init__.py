"""Tensor parallelism for a module that knows nothing of it: styles, a given or a found plan, and its numerical check."""
