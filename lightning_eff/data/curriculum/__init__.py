"""How long, large, hard and many the samples are over the run."""
