"""float32 to bfloat16 by stochastic rounding (Gupta et al. 2015, arXiv:1502.02551, section 3).

Between its two neighbours ``lower < x < upper`` in bfloat16, of equal sign, ``x`` becomes ``upper`` with probability
``(x - lower) / (upper - lower)``, so that ``E[rounded] = x``; a value that bfloat16 holds stays as it is. bfloat16 is the
upper half of float32's bits, and within one exponent the lower half counts evenly from ``lower`` to ``upper``: adding a
random 16-bit number to the bits of ``|x|`` and cutting the lower half off does exactly this, the step to the next
exponent and subnormal numbers included.

torch rounds to nearest alone. torchao's optimizers do this for their own states, within compiled code
(``_fp32_to_bf16_sr``); it is a function of its own here, with random numbers that follow from a seed.
"""

import torch
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels._seeds import spread


def stochastic_round(x: Tensor, *, seed: int, out: Tensor | None = None) -> Tensor:
    """``x`` in bfloat16, rounded stochastically (see the module's docstring).

    Args:
        x: float32, of any shape.
        seed: in [0, 2^63): another one for each call; the result follows from ``x`` and it, and does not depend on
            launch geometry. CUDA and other devices draw different numbers.
        out: contiguous bfloat16 of the shape of ``x`` to write to; None makes one.

    Returns:
        ``out``. NaN stays NaN, infinity infinity; a finite number beyond bfloat16's largest may become infinity.

    Raises:
        TypeError: ``x`` is not float32, or ``out`` not bfloat16.
        ValueError: ``seed`` out of range, or ``out`` of another shape or not contiguous.
        ImportError: ``x`` on CUDA and triton not installed.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round(x of {x.dtype}): expected float32; bfloat16 has nothing to be rounded.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"stochastic_round({seed=}): expected an integer in [0, 2^63).")
    x = x.detach().contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if out.dtype != torch.bfloat16:
        raise TypeError(f"stochastic_round(out of {out.dtype}): expected bfloat16.")
    if out.shape != x.shape or not out.is_contiguous():
        raise ValueError(
            f"stochastic_round(out of shape {tuple(out.shape)}): expected {tuple(x.shape)} as x, and contiguous."
        )
    if _launch.uses_triton(x):
        _launch.triton_module("stochastic_rounding").stochastic_round(x, out, seed)
        return out
    generator = torch.Generator(x.device).manual_seed(spread(seed) >> 1)
    bits = x.view(torch.int32)
    rounded = torch.empty_like(bits).random_(0, 1 << 16, generator=generator).add_(bits).bitwise_and_(-(1 << 16))
    rounded = torch.where(x.isfinite(), rounded.view(torch.float32), x)
    return out.copy_(rounded)


def reference_stochastic_round(x: Tensor, noise: Tensor) -> Tensor:
    """What :func:`stochastic_round` computes, by arithmetic in float64 instead of bits, for given random numbers.

    Args:
        x: finite float32.
        noise: integers in [0, 2^16), of the shape of ``x``: ``x`` moves away from zero where ``noise / 2^16`` is at
            least ``1 - f``, with ``f`` the part of the way from the neighbour nearer to zero to the other.
    """
    magnitude = x.double().abs()
    smallest = 2.0**-126  # normal; below it the step no longer shrinks
    exponent = torch.floor(torch.log2(magnitude.clamp_min(smallest)))
    exponent = torch.where(2.0**exponent > magnitude.clamp_min(smallest), exponent - 1, exponent)
    exponent = torch.where(2.0 ** (exponent + 1) <= magnitude, exponent + 1, exponent)
    step = 2.0 ** (exponent - 7)
    nearer = torch.floor(magnitude / step) * step
    away = (magnitude - nearer) / step + noise.double() / 2**16 >= 1
    return ((nearer + away * step) * x.double().sign()).to(torch.bfloat16)
