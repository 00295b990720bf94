"""A block, or a range of blocks, called on a subset or a merger of its tokens, and the rest put back."""
