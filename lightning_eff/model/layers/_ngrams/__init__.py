"""What a table of n-grams needs: an optimizer whose cost goes with the rows, caches told."""
