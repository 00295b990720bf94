"""Noisy digits whose training set is spoilt: wrong labels, or few images over and over."""
