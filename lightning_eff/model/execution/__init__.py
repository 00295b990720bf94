"""How the same network is computed: compiled blocks, and the order in which tensors lie in memory."""
