"""Attention calls of unchanged modules: read their arguments, and replace their computation."""
