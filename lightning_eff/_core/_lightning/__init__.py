"""Lightning under its two names."""
