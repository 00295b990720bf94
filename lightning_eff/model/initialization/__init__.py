"""What the weights are at step 0."""
