"""Recomputation of blocks in the backward pass, by a plan, within the module's own loop."""
