"""Tensors that blocks give to the rest of the module next to their hidden state, such as the logits or losses of routers."""
