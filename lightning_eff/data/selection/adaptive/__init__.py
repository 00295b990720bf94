"""Which samples a step trains on, by what the run finds out as it goes."""
