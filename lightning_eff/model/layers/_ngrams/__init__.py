"""What a table of n-grams needs: which embedding is the tokens', an optimizer whose cost goes with the rows, caches told."""
