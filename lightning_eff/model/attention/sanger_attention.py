"""Sanger: attention to pairs whose weight, predicted in 4 bits, exceeds a threshold (Lu et al. 2021, MICRO)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Number, OneOf
from lightning_eff._core._attention.calls import Call
from lightning_eff._core.search_space import SearchSpace, Uniform, needs_attention
from lightning_eff.model.attention._replacing.selecting import SelectedKeys, with_best
from lightning_eff.model.attention._replacing.technique import OUTSIDE, SOME_KEYS


def quantized(x: Tensor, bits: int) -> Tensor:
    """Return ``round(x / s) s`` with ``s = max|x| / (2^(bits - 1) - 1)`` for each token and head, with as many levels on
    both sides.

    Args:
        x: (B, H, L, E).
        bits: at least 2.
    """
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (x / step.clamp_min(torch.finfo(x.dtype).tiny)).round() * step, x)


def predicted(call: Call, bits: int) -> Tensor:
    """Return ``softmax(Q~ K~^T scale)`` with quantized queries and keys, (B, H, L, S); rows that see nothing are zero."""
    whole = call.scores_of(quantized(call.query, bits), quantized(call.whole_key, bits))
    return whole.float().softmax(-1).nan_to_num(0.0)


class SangerAttention(SelectedKeys):
    """Let each query attend only to keys whose attention weight is predicted to exceed a threshold.

    The prediction is ``softmax(Q~ K~^T / sqrt(d))`` of queries and keys in ``bits`` bits. Attention on pairs above
    ``threshold`` is exact, its weights sum to one again, and only these pairs have gradients; the choice has none. A
    query without such a key sees the key with the highest prediction. Masks, causal attention, grouped queries and
    dropout are supported. Each token has its own quantization step. With one step per sequence, later tokens and
    padding would change which keys an earlier query sees.

    **It saves nothing on a CPU or GPU**: predictions are made for all pairs, in the module's own precision, and
    attention runs on all of them with a mask, which costs more than the fused kernel without one. The paper's gain
    comes from its own chip. Use it to find out how sparse attention may become before quality suffers. The paper prunes
    in fine-tuning. A module that was trained with it should be used with it, and it acts in evaluation only under a
    Trainer that has it.

    Logged: ``attentions``, the calls in the last step; ``kept``, the fraction of visible pairs that were kept.

    Args:
        threshold: the predicted attention weight above which a key is kept. 0.002 is one part in 500. ``-math.inf``
            keeps all keys, which is plain training.
        bits: the number of bits of queries and keys in the prediction. 4 is the paper's.

    Raises:
        ValueError: for a value out of range. At setup, for compiled modules. At the first batch, before any weight has
            changed, if there is no attention or a call cannot be replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SangerAttention(threshold=0.002)])

    References:
        Lu et al. 2021, "Sanger: A Co-Design Framework for Enabling Sparse Attention using Reconfigurable Architecture",
        MICRO, doi:10.1145/3466752.3480125.
    """

    paper = "Lu et al. 2021, doi:10.1145/3466752.3480125"
    search_space = SearchSpace({"threshold": Uniform(5e-4, 0.02, log=True)}, needs_attention)
    conflicts: ClassVar[Mapping[str, str]] = {**OUTSIDE, **SOME_KEYS}
    neutral_at: ClassVar[Mapping[str, Any]] = {"threshold": -math.inf}

    def __init__(
        self,
        threshold: Annotated[float, Either(Number(below=1), OneOf(-math.inf))] = 0.002,
        *,
        bits: Annotated[int, Count(at_least=2, at_most=8)] = 4,
    ) -> None:
        self.threshold, self.bits = float(threshold), bits

    @override
    def keep(self, call: Call) -> Tensor:
        weights = predicted(call, self.bits)
        return with_best(weights > self.threshold, weights, call.may_see())
