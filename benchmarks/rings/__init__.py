"""A small vision transformer on rings with a hatched mark to find: an image task in which resolution matters."""
