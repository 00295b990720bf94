"""Weights that are zero: masks over the parameters of an unchanged module, and who chooses them."""
