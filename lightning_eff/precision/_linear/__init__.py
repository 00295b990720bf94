"""Linear maps of an unchanged module that run in another arithmetic: which they are, and how they are exchanged."""
