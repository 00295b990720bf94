"""Samples made of two or more: the mixup family, with both labels in one pass."""
