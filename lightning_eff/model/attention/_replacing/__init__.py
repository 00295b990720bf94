"""Every call of attention of an unchanged module, taken hold of from outside, and what is computed in its place."""
