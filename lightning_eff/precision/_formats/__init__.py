"""Floating-point formats of 8 and 16 bits, and rounding to them."""
