"""Which stacks of blocks a module may hold: in lists, by names, and at the paths that the user gives."""
