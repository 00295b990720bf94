"""The parts of Muon: its settings, the orthogonal step, and its division over ranks."""
