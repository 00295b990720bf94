"""Call a block, or a range of blocks, on a subset or a merger of its tokens, and put the other tokens back."""
