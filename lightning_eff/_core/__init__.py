"""The interfaces through which techniques reach into training. Nothing here imports a technique."""
