"""Checkpoints that are folders of every rank's pieces, and how a background thread writes them."""
