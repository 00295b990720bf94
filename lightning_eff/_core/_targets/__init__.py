"""Observe the loss calls of an unchanged ``training_step``, and give them other targets in the same forward pass."""
