"""How a network is executed: compiled blocks, and the memory format of tensors."""
