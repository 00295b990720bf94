"""Hooks that do nothing are not called, and loggers are muted in passes that leave no trace."""
