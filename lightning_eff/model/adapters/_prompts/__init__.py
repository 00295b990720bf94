"""Trained prompts before the tokens of a text, or after the patches of an image."""
