"""Stochastic rounding from float32 to bfloat16 (Gupta et al. 2015, arXiv:1502.02551, section 3).

Let ``lower < x < upper`` be the neighbours of ``x`` in bfloat16. ``x`` becomes ``upper`` with probability
``(x - lower) / (upper - lower)``, so ``E[rounded] = x``. Values of bfloat16 do not change.

bfloat16 is the upper half of float32's bits. Within one exponent, the lower half counts evenly from ``lower`` to ``upper``. So
the code adds a random 16-bit number to the bits of ``|x|`` and cuts off the lower half. This is exact for the step to the next
exponent and for subnormal numbers too.

torch can only round to nearest. torchao's optimizers round their states like this inside compiled code
(``_fp32_to_bf16_sr``). This module provides a function with random numbers from a seed.
"""

import torch
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels._seeds import spread


def stochastic_round(x: Tensor, *, seed: int, out: Tensor | None = None) -> Tensor:
    """Round ``x`` stochastically to bfloat16 (see the module's docstring).

    The result depends only on ``x`` and the seed, and not on launch geometry. CUDA and other devices draw different numbers.

    Args:
        x: float32, of any shape.
        seed: in [0, 2^63), different for each call.
        out: contiguous bfloat16 tensor for the result, in the shape of ``x``; None allocates one.

    Returns:
        ``out``. NaN and infinity do not change. A finite number above the largest of bfloat16 can become infinity.

    Raises:
        TypeError: if ``x`` is not float32, or ``out`` is not bfloat16.
        ValueError: if ``seed`` is out of range, or ``out`` has another shape or is not contiguous.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round(x of {x.dtype}): expected float32. A bfloat16 tensor needs no rounding.")
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
    round_into(out.view(-1), x.view(-1), generator(seed, x.device))
    return out


def generator(seed: int, device: torch.device) -> torch.Generator:
    """Return torch's generator for a seed."""
    return torch.Generator(device).manual_seed(spread(seed) >> 1)


def draw(num: int, generator: torch.Generator) -> Tensor:
    """Draw ``num`` integers in [-2^15, 2^15), as int16. Four come from each 64-bit number, in half the time of four draws."""
    words = torch.empty(-(-num // 4), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.int16)[:num]


def round_into(out: Tensor, x: Tensor, generator: torch.Generator) -> None:
    """Round ``x`` (float32, one dimension) with torch's operations into ``out`` (bfloat16)."""
    rounded = (
        (x.view(torch.int32) + (1 << 15)).add_(draw(len(x), generator)).bitwise_and_(-(1 << 16)).view(torch.float32)
    )
    out.copy_(rounded)
    # noise turns infinity into NaN, and some NaN into zero; on a CPU it costs less to look for them than to exclude them
    if x.device.type != "cpu" or (len(x) and not all(bound.isfinite() for bound in x.aminmax())):
        out.copy_(torch.where(x.isfinite(), rounded, x))


def reference_stochastic_round(x: Tensor, noise: Tensor) -> Tensor:
    """Reference for :func:`stochastic_round` by float64 arithmetic, with given random numbers.

    ``x`` moves away from zero if ``noise / 2^16`` is at least ``1 - f``. ``f`` is its position between the neighbour nearer to
    zero (0) and the other one (1).

    Args:
        x: finite float32.
        noise: integers in [0, 2^16), in the shape of ``x``.
    """
    magnitude = x.double().abs()
    smallest = 2.0**-126  # the smallest normal number; below it the step does not shrink
    exponent = torch.floor(torch.log2(magnitude.clamp_min(smallest)))
    exponent = torch.where(2.0**exponent > magnitude.clamp_min(smallest), exponent - 1, exponent)
    exponent = torch.where(2.0 ** (exponent + 1) <= magnitude, exponent + 1, exponent)
    step = 2.0 ** (exponent - 7)
    nearer = torch.floor(magnitude / step) * step
    away = (magnitude - nearer) / step + noise.double() / 2**16 >= 1
    return ((nearer + away * step) * x.double().sign()).to(torch.bfloat16)
