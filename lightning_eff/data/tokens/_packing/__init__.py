"""Blocks of a stack called on padded batches without their padding, several samples in one row."""
