"""Selection before or outside training: files of indices and scores, n-grams of texts, and scores by a module."""
