"""Named, versioned sets of techniques for a kind of training, which adapt to the module."""
