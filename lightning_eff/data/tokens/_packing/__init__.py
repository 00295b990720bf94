"""Blocks that compute padded batches without their padding, with several samples per row."""
