"""What a search tries next, and the values that it takes from ranges."""
