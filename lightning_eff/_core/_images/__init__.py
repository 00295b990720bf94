"""Images in batches of any make, smaller ones, and modules that take them."""
