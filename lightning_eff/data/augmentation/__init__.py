"""Samples made of samples and noise: the mixup family, erasing, smoothing."""
