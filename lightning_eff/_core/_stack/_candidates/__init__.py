"""The possible stacks of blocks in a module: in lists, by names, and at the paths that the user gives."""
