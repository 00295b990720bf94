"""Symmetric quantisation to int8 by row, for integer matrix products (DoReFa: Zhou et al. 2016, arXiv:1606.06160).

    s = max|x| / 127,   q = floor(x / s + u)        by row;  u = 1/2: nearest;  u ~ U(0, 1): stochastic

With stochastic rounding ``E[s q] = x``, zeros stay zero, and the largest element of a row keeps its code.
"""

import torch
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels._seeds import spread

LARGEST = 127
"""Integers range from -127 to 127."""


def quantize_rows(x: Tensor, *, factor: Tensor | None = None, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantise the rows of ``x factor`` (see the module's docstring).

    On CUDA one Triton kernel multiplies, finds the scales and rounds. It reads ``x`` once if rows have at most 16384 elements.

    Args:
        x: float32, bfloat16 or float16 of shape (R, C), with any strides.
        factor: float32 (C,), multiplied into each row first; None means 1.
        seed: in [0, 2^63) for stochastic rounding, different for each call; None rounds to nearest, ties to even. CUDA and
            other devices draw different numbers.

    Returns:
        The integers, int8 (R, C), and the scales, float32 (R,). The scale of a row with an infinity or NaN is not finite.
        A row whose largest magnitude is below 1e-36 gets codes that are too small.

    Raises:
        ValueError: if ``x`` is not a matrix, or ``seed`` is out of range.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    if x.ndim != 2:
        raise ValueError(f"quantize_rows(x of shape {tuple(x.shape)}): expected a matrix. Use x.flatten(0, -2).")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"quantize_rows({seed=}): expected an integer in [0, 2^63), or None to round to nearest.")
    if _launch.uses_triton(x):
        q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
        factor = None if factor is None else factor.contiguous()
        _launch.triton_module("int8_quantization").quantize_rows(x.detach().contiguous(), factor, q, scale, seed)
        return q, scale
    generator = None if seed is None else torch.Generator(x.device).manual_seed(spread(seed) >> 1)
    return in_torch(x.float() if factor is None else x * factor, generator)


def in_torch(x: Tensor, generator: torch.Generator | None, largest: int = LARGEST) -> tuple[Tensor, Tensor]:
    """Quantise the rows of a float32 ``x`` by torch's operations; a ``generator`` on its device rounds stochastically.

    The integers range from ``-largest`` to ``largest``. They are int16 if int8 cannot hold them.
    """
    dtype = torch.int8 if largest <= LARGEST else torch.int16
    scale = x.abs().amax(1) / largest
    t = (x / scale.unsqueeze(1)).nan_to_num_(0.0).clamp_(-largest, largest)  # 0 / 0 in a row of zeros
    if generator is None:
        return t.round_().to(dtype), scale
    down = t.floor()
    up = torch.rand(t.shape, generator=generator, device=t.device, dtype=torch.float32) < t.sub_(down)
    return down.add_(up).to(dtype), scale
