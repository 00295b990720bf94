"""Averaged weights, which validation and checkpoints see."""
