"""A compressed tensor among what an autograd Function keeps for backward."""

from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels.group_quantization import Packed


def keep(ctx: Any, packed: Packed | Tensor, *others: Tensor | None) -> None:
    """``ctx.save_for_backward``, from which :func:`kept` returns the same.

    Scales and minima are kept as integers of the same bytes: whoever compresses what autograd saves leaves integers
    alone, and would otherwise compress them once more.
    """
    if isinstance(packed, Packed):
        ctx.layout = packed.shape, packed.dtype, packed.bits, packed.group_size
        scale, minimum = packed.scale.view(torch.int32), packed.minimum.view(torch.int32)
        ctx.save_for_backward(packed.codes, scale, minimum, *others)
    else:
        ctx.layout = None
        ctx.save_for_backward(packed, *others)


def kept(ctx: Any) -> tuple[Packed | Tensor, *tuple[Tensor | None, ...]]:
    """What :func:`keep` was given."""
    if ctx.layout is None:
        return ctx.saved_tensors
    codes, scale, minimum, *others = ctx.saved_tensors
    return (Packed(codes, scale.view(torch.float32), minimum.view(torch.float32), *ctx.layout), *others)
