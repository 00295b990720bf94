"""Residual branches and attention that users name, where they are not found automatically."""
