"""Feed-forward networks with several experts and a router."""
