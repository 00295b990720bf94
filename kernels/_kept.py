"""Saves compressed tensors in an autograd Function for its backward pass."""

from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels.group_quantization import Packed


def keep(ctx: Any, packed: Packed | Tensor, *others: Tensor | None) -> None:
    """Call ``ctx.save_for_backward``; :func:`kept` returns the same tensors.

    Scales and minima are saved as integers of the same bytes. Techniques that compress saved tensors skip integers, so they
    do not compress these again.
    """
    if isinstance(packed, Packed):
        ctx.layout = packed.shape, packed.dtype, packed.bits, packed.group_size
        scale, minimum = packed.scale.view(torch.int32), packed.minimum.view(torch.int32)
        ctx.save_for_backward(packed.codes, scale, minimum, *others)
    else:
        ctx.layout = None
        ctx.save_for_backward(packed, *others)


def kept(ctx: Any) -> tuple[Packed | Tensor, *tuple[Tensor | None, ...]]:
    """Return the arguments of :func:`keep`."""
    if ctx.layout is None:
        return ctx.saved_tensors
    codes, scale, minimum, *others = ctx.saved_tensors
    return (Packed(codes, scale.view(torch.float32), minimum.view(torch.float32), *ctx.layout), *others)
