"""Augmentations of images that need more than a box: policies of operations, their mixtures, GANs, styles."""
