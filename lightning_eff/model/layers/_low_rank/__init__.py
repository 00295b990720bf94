"""Maps and convolutions as products of two smaller ones."""
