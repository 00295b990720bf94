"""The weights of micro-batches in the loss of their batch, and how they are found."""
