"""Parts of torch's encoder layers, which a fused kernel reads in evaluation without calling them."""

from torch import nn

REASON = "the nn.TransformerEncoderLayer around it reads it in evaluation instead of calling it"


def read_in_evaluation(root: nn.Module) -> set[int]:
    """Ids of the norms and activations that ``nn.TransformerEncoderLayer`` passes to its own kernel."""
    layers = [m for m in root.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    return {id(part) for m in layers for part in (m.norm1, m.norm2, getattr(m, "activation", None)) if part is not None}


def linear_in_evaluation(root: nn.Module) -> set[int]:
    """Ids of the linear layers whose biases ``nn.TransformerEncoderLayer`` passes to its own kernel."""
    layers = [m for m in root.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    return {id(part) for m in layers for part in (m.linear1, m.linear2)}
