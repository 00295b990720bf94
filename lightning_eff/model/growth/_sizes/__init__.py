"""How much of a network there is: shares of the budget and of the full size, blocks, and the length of sequences."""
