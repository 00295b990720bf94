"""A small vision transformer on rings with a cut to find: an image task in which resolution matters."""
