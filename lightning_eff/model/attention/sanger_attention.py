"""Sanger: pairs whose weight, predicted in 4 bits, exceeds a threshold (Lu et al. 2021, MICRO)."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._attention.calls import Call
from lightning_eff._core.search_space import SearchSpace, Survey, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.selecting import SLOWER, SelectedKeys, with_best
from lightning_eff.model.attention._replacing.technique import OUTSIDE, SOME_KEYS, no_sequences

WHO = "SangerAttention"


def quantized(x: Tensor, bits: int) -> Tensor:
    """``round(x / s) s`` with ``s = max|x| / (2^(bits - 1) - 1)`` for each token and head: as many levels on either side of 0.

    Args:
        x: (B, H, L, E).
        bits: >= 2.
    """
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (x / step.clamp_min(torch.finfo(x.dtype).tiny)).round() * step, x)


def predicted(call: Call, bits: int) -> Tensor:
    """``softmax(Q~ K~^T scale)`` with quantized queries and keys, (B, H, L, S); rows that see nothing are zero."""
    whole = call.scores_of(quantized(call.query, bits), quantized(call.whole_key, bits))
    return whole.float().softmax(-1).nan_to_num(0.0)


class SangerAttention(SelectedKeys):
    """Let each query see the keys alone whose attention weight is predicted to exceed a threshold.

    The prediction is ``softmax(Q~ K~^T / sqrt(d))`` of queries and keys in ``bits`` bits. Attention on the pairs with more than
    ``threshold`` is exact, its weights sum to one again, and gradients are those of these pairs; the choice has none. A query
    with no such key sees the one that is predicted highest. Masks, causal attention, grouped queries and dropout go along; a
    key that may not be seen is in no prediction. Each token has its own quantization step. With one step for a whole sequence,
    later tokens and padding would change which keys an earlier query sees.

    **It saves nothing on a CPU or GPU**: predictions are made for all pairs, in the module's own numbers, and attention runs on
    all of them with a mask, which costs more than the fused kernel without one. The paper's gain is that of its own chip, which
    packs what is left and splits it evenly over its units; that is not done here. What it is for is how sparse attention may
    become before quality suffers. The paper prunes in fine-tuning; a module that was trained with it should be used with it: it
    acts in evaluation of a Trainer that has it, and nowhere else.

    Logged: ``attentions``, calls in the last step; ``kept``, the share of the pairs that could be seen.

    Args:
        threshold: a weight, below 1: 0.002 leaves a key out that has less than one part in 500. ``-math.inf`` leaves all in,
            which is plain training.
        bits: of queries and keys in the prediction, from 2 to 8.

    Raises:
        ValueError: for other values; at the first batch, before any weight has changed, where no attention is seen, or one
            cannot be replaced, with the reason; at setup for compiled modules.

    Sources:
        Lu et al. 2021, "Sanger: A Co-Design Framework for Enabling Sparse Attention using Reconfigurable Architecture", MICRO,
        doi:10.1145/3466752.3480125.
    """

    saves: ClassVar[str] = "products of attention on hardware that passes over pairs one by one; costs time elsewhere"
    paper: ClassVar[str] = "Lu et al. 2021, doi:10.1145/3466752.3480125"
    constraints: ClassVar[str] = (
        "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; no faster on a CPU or GPU"
    )
    survey: ClassVar[Survey | None] = Survey("sparse attention in hardware (Sanger)", zhuang="4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"threshold": Uniform(5e-4, 0.02, log=True)}, no_sequences)
    control: ClassVar[Control] = SLOWER
    conflicts: ClassVar[Mapping[str, str]] = {**OUTSIDE, **SOME_KEYS}

    def __init__(self, threshold: float = 0.002, *, bits: int = 4) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold < 1.0:
            raise ValueError(
                f"{WHO}({threshold=}): expected an attention weight below 1, such as 0.002, or -math.inf for all of them."
            )
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise ValueError(f"{WHO}({bits=}): expected an integer from 2 to 8; the source has 4.")
        self.threshold, self.bits = float(threshold), bits

    @property
    @override
    def neutral(self) -> bool:
        return self.threshold == -math.inf

    @override
    def keep(self, call: Call) -> Tensor:
        weights = predicted(call, self.bits)
        return with_best(weights > self.threshold, weights, call.may_see())
