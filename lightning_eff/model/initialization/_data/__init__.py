"""The parts of batches from which weights are computed: running text, and patches of images."""
