"""Which samples a step sees."""
