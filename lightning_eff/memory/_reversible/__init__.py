"""Reversible blocks: their sums, and the engine that computes inputs from outputs."""
