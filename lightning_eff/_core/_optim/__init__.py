"""Combine several optimizers into one, with the module's schedulers around it."""
