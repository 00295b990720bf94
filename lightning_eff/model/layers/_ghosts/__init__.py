"""BatchNorm over parts of a batch."""
