"""Growth by search: the sources of new blocks, moving averages, and the choice of the best sub-network."""
