"""What checkpoints hold of divided parameters and optimizer states, and how the parts come together."""
