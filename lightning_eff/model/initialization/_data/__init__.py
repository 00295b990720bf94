"""Where the data stand of which weights are made: running text in batches, and patches of images."""
