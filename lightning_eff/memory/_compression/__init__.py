"""Saved tensors in compressed form: their roles, codes and bits."""
