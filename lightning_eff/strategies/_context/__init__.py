"""Context parallelism: ranks divide the tokens of each sequence inside the blocks of an unchanged module."""
