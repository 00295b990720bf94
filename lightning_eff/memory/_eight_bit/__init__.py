"""Optimizers with quantized states, and the conversion of the module's own."""
