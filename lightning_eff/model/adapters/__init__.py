"""Few parameters that are trained, beside many that stay as they are."""
