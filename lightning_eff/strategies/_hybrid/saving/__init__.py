"""Checkpoints of divided parameters and optimizer states."""
