"""Modules as products of two thin factors."""
