"""Checks at setup that a cut module computes the same as the whole one."""
