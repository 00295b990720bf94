"""The logits of an unchanged step as a stand-in that knows how to compute them, up to the loss that they are for."""
