"""AdamW on bfloat16 weights and moments, with every new value rounded stochastically (Loshchilov & Hutter 2019,
arXiv:1711.05101; rounding: Gupta et al. 2015, arXiv:1502.02551).

For a weight ``p`` with gradient ``g`` and moments ``m`` and ``v``, at step ``t >= 1``, the update in float32 is:

    p <- p (1 - lr wd)
    m <- m + (g - m) (1 - b1)
    v <- b2 v + (1 - b2) g^2

    p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

Then ``p``, ``m`` and ``v`` are rounded to bfloat16 by :mod:`.stochastic_rounding`, each with different random numbers. This
moves 14 bytes per weight. Float32 AdamW moves 28, and a bfloat16 model with a float32 master copy 34.

torch's fused AdamW rounds bfloat16 weights to nearest, which loses updates below 2^-9 of a weight. torchao's optimizer
rounds only the weight stochastically, and needs torch.compile. On CUDA this module is one kernel. On other devices it uses
torch operations.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels.stochastic_rounding import generator, round_into

CHUNK = 2**16  #: elements at a time outside of CUDA, so that float32 values stay in a CPU's cache


def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    seed: int,
) -> None:
    """Do one step in place on ``p``, ``m`` and ``v`` (see the module's docstring).

    Args:
        p: bfloat16, contiguous, of any shape.
        g: bfloat16 or float32, with the shape of ``p``.
        m: the first moment, like ``p``.
        v: the second moment, like ``p``.
        lr: learning rate.
        betas: ``b1`` and ``b2``, in [0, 1).
        eps: > 0.
        weight_decay: ``wd``, decoupled.
        step: ``t``, starting at 1.
        seed: in [0, 2^61), different for each call.

    Raises:
        TypeError: if ``p``, ``m`` or ``v`` is not bfloat16.
        ValueError: if a shape differs, or a tensor is not contiguous.
        ImportError: if ``p`` is on CUDA and triton is not installed.
    """
    for name, tensor in (("p", p), ("m", m), ("v", v)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"adamw_({name} of {tensor.dtype}): expected bfloat16. Use torch.optim.AdamW for other types."
            )
        if tensor.shape != p.shape or not tensor.is_contiguous():
            raise ValueError(f"adamw_({name} of shape {tuple(tensor.shape)}): expected {tuple(p.shape)}, contiguous.")
    if g.shape != p.shape:
        raise ValueError(f"adamw_(g of shape {tuple(g.shape)}): expected {tuple(p.shape)}, as p.")
    b1, b2 = betas
    size, root = lr / (1 - b1**step), math.sqrt(1 - b2**step)
    if _launch.uses_triton(p):
        way = _launch.triton_module("bf16_adamw")
        way.adamw_(p, g.contiguous(), m, v, 1 - lr * weight_decay, size, b1, b2, root, eps, seed)
        return
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": step}
    generators = [generator(3 * seed + i, p.device) for i in range(3)]
    chunks = zip(*(t.detach().reshape(-1).split(CHUNK) for t in (p, g, m, v)), strict=True)
    for held, grad, first, second in chunks:
        new = reference_adamw(held, grad, first, second, **settings)
        for value, into, source in zip(new, (held, first, second), generators, strict=True):
            round_into(into, value, source)


def reference_adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new ``p``, ``m`` and ``v`` in float32 before rounding."""
    b1, b2 = betas
    p, g, m, v = (t.detach().float() for t in (p, g, m, v))
    p = p * (1 - lr * weight_decay)
    m = m + (g - m) * (1 - b1)
    v = b2 * v + (1 - b2) * g * g
    denominator = v.sqrt() / math.sqrt(1 - b2**step) + eps
    return p - lr / (1 - b1**step) * m / denominator, m, v
