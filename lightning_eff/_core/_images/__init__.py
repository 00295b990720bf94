"""Find the images in batches, shrink them, and let modules accept smaller images."""
