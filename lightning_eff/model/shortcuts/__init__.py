"""Connections past blocks: from the embedding, from earlier blocks, and between the values of attention."""
