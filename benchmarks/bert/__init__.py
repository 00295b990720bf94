"""A masked language model (BERT) over bytes of the Python standard library's own source text."""
