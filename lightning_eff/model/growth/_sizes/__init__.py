"""The sizes of a network that grows: stages, blocks, and the length of sequences."""
