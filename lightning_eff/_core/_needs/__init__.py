"""What techniques need of a strategy, how strategies divide a module, and which techniques are refused."""
