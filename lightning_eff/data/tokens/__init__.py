"""Techniques that choose the tokens to compute: dropping, merging, packing, masking and sparse prediction."""
