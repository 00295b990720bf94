"""Linear layers of an unchanged module that run in low precision: how they are found and replaced."""
