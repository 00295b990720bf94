"""A table of n-grams that is added to the token embedding."""
