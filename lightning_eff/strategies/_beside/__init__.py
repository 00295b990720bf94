"""Tensors that blocks give to the rest of the module beside their hidden state, such as the logits or losses of routers."""
