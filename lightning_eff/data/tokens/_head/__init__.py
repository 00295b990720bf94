"""Placeholders for logits that know how to compute them, up to the loss that uses them."""
