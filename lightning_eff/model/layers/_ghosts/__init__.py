"""Batch norms by parts of a batch."""
