"""The engine of masks: which weights can be zero, how many of each are, and who sees to it."""
