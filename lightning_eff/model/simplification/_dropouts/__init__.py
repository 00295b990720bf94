"""Where a module keeps the probabilities of its dropout."""
