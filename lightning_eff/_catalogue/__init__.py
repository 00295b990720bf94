"""The catalogue: what the two surveys of efficient training name, and what does it here."""
