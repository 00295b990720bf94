"""Which tokens of a sample are computed."""
