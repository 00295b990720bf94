"""The reference task of the recipe for convolutional networks."""
