"""Proposals for the next trial, and values from ranges."""
