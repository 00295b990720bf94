"""How techniques choose the samples of an epoch, their order and their weights."""
