"""Texts made of texts: noise in tokens, words changed, moved, put in and left out."""
