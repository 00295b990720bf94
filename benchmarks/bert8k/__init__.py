"""A masked language model over 8,255 pieces of the Python standard library's source text: what a head costs, shows."""
