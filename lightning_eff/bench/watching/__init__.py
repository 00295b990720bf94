"""What the efficiency monitor looks at a run with."""
