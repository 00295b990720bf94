"""Which modules are norms, and what a kernel needs to know about each."""
