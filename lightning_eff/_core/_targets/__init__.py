"""The loss calls of an unchanged ``training_step``, given other targets in the same forward pass."""
