"""What is found of a data set's samples before or beside training: files of it, text by n-grams, scores by a module."""
