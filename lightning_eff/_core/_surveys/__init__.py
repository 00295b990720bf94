"""The items of two surveys of efficient training."""
