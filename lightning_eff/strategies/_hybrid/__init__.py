"""Pieces of HybridParallelStrategy: layout, weights, sharding, clipping, checkpoints, and the watch over all processes."""
