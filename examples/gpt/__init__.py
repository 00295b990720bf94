"""A small byte-level GPT on the Python standard library's own source text."""
