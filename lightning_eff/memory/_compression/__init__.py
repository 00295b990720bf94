"""Saved tensors in compressed form: what each of them is, how it is held, and how many bits it gets."""
