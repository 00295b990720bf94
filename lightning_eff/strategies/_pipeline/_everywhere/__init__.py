"""What every rank of a pipeline sees, though one of them computes it."""
