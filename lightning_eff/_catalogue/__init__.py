"""The catalogue: the techniques of two surveys of efficient training, and the classes that implement them."""
