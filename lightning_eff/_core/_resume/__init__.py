"""Resuming: the work that was due when a checkpoint was saved, and state that Lightning does not save."""
