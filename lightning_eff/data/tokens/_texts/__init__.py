"""Batches of texts: their tokens and labels, and the arguments that name them."""
