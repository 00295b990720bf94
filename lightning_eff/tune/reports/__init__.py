"""The report of a search in words and pictures, its recipe and its cost."""
