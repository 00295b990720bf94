"""What a stack of blocks is made of: how it is found, what of it is seen, and what a module makes of what it saw."""
