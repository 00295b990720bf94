"""Support for both of Lightning's package names, optional dependencies, and settings as text."""
