"""Attention as unchanged modules call it: read as numbers, and computed otherwise."""
