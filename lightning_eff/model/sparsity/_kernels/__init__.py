"""Torch's sparse kernels for products with masked weights: where they run, and how a weight is packed for them."""
