"""The public names, and when they are imported."""
