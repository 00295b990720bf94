"""Techniques that learn during the run which samples to train on."""
