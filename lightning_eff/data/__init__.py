"""Which samples, tokens and lengths a step sees."""
