"""Gradients multiplied by an estimate of inverse curvature, before the module's own optimizer steps along them."""
