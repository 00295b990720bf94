"""Feed-forward networks that train with a part of their hidden units."""
