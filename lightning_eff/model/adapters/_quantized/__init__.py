"""Frozen linear layers with quantised weights, rounded by bitsandbytes."""
