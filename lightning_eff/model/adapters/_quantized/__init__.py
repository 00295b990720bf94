"""Frozen linear maps whose weights are kept in few bits, by bitsandbytes' own rounding."""
