"""What Muon is made of: its settings, the orthogonal step, and how ranks divide it."""
