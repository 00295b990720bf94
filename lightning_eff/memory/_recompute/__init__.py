"""Running blocks again in the backward pass, by a plan, over the user's own loop."""
