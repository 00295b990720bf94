"""How weights move: optimizers, sharpness, large batch, averaging."""
