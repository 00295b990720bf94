"""What watches a run for problems."""
