"""Prompts of learnt numbers before the tokens of a text, or the patches of an image."""
