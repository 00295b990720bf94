"""Parts of torch's own encoder layers, which in evaluation are read by one kernel and not called."""

from torch import nn

REASON = "nn.TransformerEncoderLayer, which it is a part of, reads it in evaluation instead of calling it"


def read_in_evaluation(root: nn.Module) -> set[int]:
    """Ids of norms and activations that ``nn.TransformerEncoderLayer`` hands to a kernel of its own."""
    layers = [m for m in root.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    return {id(part) for m in layers for part in (m.norm1, m.norm2, getattr(m, "activation", None)) if part is not None}
