"""Setting weights that a strategy divides over the ranks: before it does, or one piece at a time."""
