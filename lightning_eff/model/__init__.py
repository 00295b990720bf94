"""Techniques that change what the network computes at a step: how many of its blocks run, and which."""
