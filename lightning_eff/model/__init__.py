"""What the network computes at a step."""
