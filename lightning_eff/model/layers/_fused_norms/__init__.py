"""Which modules are norms, and what one kernel needs to know of each."""
