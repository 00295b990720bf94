"""GPT-2 of 124 million parameters on the bytes of the Python standard library's own source text, for a GPU."""
