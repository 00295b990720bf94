"""Optimizers whose states have few bits: which ones there are, and how the module's own becomes one."""
