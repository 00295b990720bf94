"""Augmentations that apply operations to images: policies, AugMix, and DiffAugment for GANs."""
