"""Emulated numbers of 1 to 16 bits, and the choice of bits per layer."""
