"""What is not called: hooks that do nothing, and loggers in passes that leave no trace."""
