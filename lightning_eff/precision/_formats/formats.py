"""Round float32 numbers to narrower floating-point formats, bit-identical to hardware with that format.

A format with ``mantissa_bits`` = M, ``bias`` = b and exponent field E >= 0 has the numbers

    ± 2^(max(E, 1) - b) (c + f / 2^M),  f = 0 .. 2^M - 1,  c = 0 for E = 0 (subnormal), else 1.

Numbers of magnitude in [2^e, 2^(e+1)) are ``2^(max(e, 1 - b) - M)`` apart, so rounding is to a multiple of that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_eff.kernels.fp8_cast import saturated


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: the name in messages.
        exponent_bits: the width of the exponent field.
        mantissa_bits: the width of the fraction field, without the implicit leading bit.
        bias: the value that is subtracted from the exponent field.
        max_value: the largest finite number.
        finite: whether the format has no infinity, so that overflow without saturation gives NaN, as in E4M3FN.
        dtype: torch's dtype with the same numbers, or None.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    finite: bool
    dtype: torch.dtype | None

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits


E4M3 = Format("E4M3", 4, 3, 7, 448.0, True, torch.float8_e4m3fn)
E5M2 = Format("E5M2", 5, 2, 15, 57344.0, False, torch.float8_e5m2)
FP16 = Format("FP16", 5, 10, 15, 65504.0, False, torch.float16)
BF16 = Format("BF16", 8, 7, 127, (2 - 2.0**-7) * 2.0**127, False, torch.bfloat16)

FP8_152 = Format("FP8 1-5-2", 5, 2, 15, 57344.0, False, torch.float8_e5m2)
"""FP8 of Wang et al. 2018 (arXiv:1812.08011). The paper gives the widths; the rest follows IEEE 754."""

FP16_169 = Format("FP16 1-6-9", 6, 9, 31, (2 - 2.0**-9) * 2.0**31, False, None)
"""FP16 of Wang et al. 2018 (arXiv:1812.08011), for accumulation and weights; IEEE 754 with other widths."""

_FIELD = 0x7F800000  # the exponent field of a float32
_REST = 0xFFFF  # the bits of a float32 that bfloat16 drops


@torch.no_grad()
def round_to(
    x: Tensor,
    fmt: Format,
    *,
    generator: torch.Generator | None = None,
    stochastic: bool = False,
    saturate: bool = True,
) -> Tensor:
    """Round to the numbers of ``fmt``.

    Args:
        x: float32, any shape.
        fmt: the format.
        generator: the generator for stochastic rounding, on ``x``'s device. None is the global one.
        stochastic: round up with the probability that makes the mean ``x`` (to 2^-24 of the distance of two numbers).
            Otherwise round to nearest, ties to even.
        saturate: whether numbers beyond ``max_value``, and infinities, become ``max_value`` with their sign. Otherwise they
            become infinity, or NaN in a format without infinities; nearest rounding then overflows from half a step past
            ``max_value``.

    Returns:
        float32, the shape of ``x``. NaN stays NaN, and zero keeps its sign.

    Raises:
        TypeError: if ``x`` is not float32.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"round_to(x of {x.dtype}, {fmt.name}): expected float32. Convert with x.float().")
    if fmt.bias == 127:
        y = _round_bfloat16(x, generator, stochastic)
    else:
        # 2^max(e, 1-b), as the bits of a float32; q = 2^(max(e, 1-b) - M); 1/q
        power = (x.view(torch.int32) & _FIELD).clamp_(min=(128 - fmt.bias) << 23)
        q = power.sub_(fmt.mantissa_bits << 23)
        t = x * ((254 << 23) - q).view(torch.float32)  # exact: a power of two, and no overflow
        if stochastic:
            down = t.floor()
            up = torch.rand(t.shape, generator=generator, device=t.device, dtype=torch.float32) < t.sub_(down)
            y = torch.copysign(down.add_(up).mul_(q.view(torch.float32)), x)
        else:
            y = t.round_().mul_(q.view(torch.float32))  # half to even
    if saturate:
        return y.clamp_(-fmt.max_value, fmt.max_value)
    if fmt.finite:
        return y.masked_fill_(y.abs() > fmt.max_value, torch.nan)
    # numbers past 2^b (2 - 2^-M) overflow float32 when multiplied by 2^(127 - b)
    return y.mul_(2.0 ** (127 - fmt.bias)).mul_(2.0 ** (fmt.bias - 127))


def _round_bfloat16(x: Tensor, generator: torch.Generator | None, stochastic: bool) -> Tensor:
    """Round to bfloat16, which is the upper half of a float32's bits, subnormals included."""
    if not stochastic:
        return x.to(torch.bfloat16).float()
    bits = x.view(torch.int32)
    draw = torch.randint(_REST + 1, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    carried = ((bits + draw) & ~_REST).view(torch.float32)  # the magnitude grows with the lower 31 bits
    return torch.where(x.isfinite(), carried, x)


def cast_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to torch's ``float8_e4m3fn`` or ``float8_e5m2`` with saturation, like the hardware's saturating cast.

    torch's own cast gives infinity on E5M2 overflow.

    Args:
        x: float32, float16 or bfloat16, any shape.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        ``x`` rounded to nearest, ties to even. Values beyond the largest number, and infinities, become that number with the
        sign of ``x``. NaN stays NaN.

    Raises:
        TypeError: if ``x`` or ``dtype`` has another type.
    """
    if dtype not in (E4M3.dtype, E5M2.dtype):
        raise TypeError(f"cast_fp8({dtype=}): expected torch.float8_e4m3fn or torch.float8_e5m2.")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"cast_fp8(x of {x.dtype}): expected float32, float16 or bfloat16. Convert with x.float().")
    return saturated(x, dtype)
