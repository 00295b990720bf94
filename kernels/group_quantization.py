"""Group-wise affine quantisation to 1, 2, 3, 4 or 8 bits, packed (ActNN: Chen et al. 2021, arXiv:2104.14129, section 4).

A tensor is cut in memory order into groups of ``group_size`` elements. Each group keeps its minimum and the width of a step
in float32. Each element keeps a code of ``bits`` bits:

    scale   = (max - min) / (2^bits - 1)

    code    = clamp(floor((x - min) / scale + u), 0, 2^bits - 1)        u = 1/2: nearest; u ~ U(0, 1): stochastic

    decoded = min + scale code

With stochastic rounding ``E[decoded] = x``, and the error of an element is below one step. With nearest rounding it is at
most half a step. A group of equal values has scale 0 and decodes exactly.

In a group of ``L = group_size * bits / 8`` bytes, byte ``p`` holds elements ``p, p + L, p + 2 L, ...``, the first in the lowest
bits. So no element moves between vector lanes, on a CPU or on a GPU. 3 bits are stored as two planes in this form: the lower
two bits of all elements of the group, then their upper bit. The last group is padded with codes 0.

Three implementations compute the same codes, except for values on the boundary between two codes. They are
:func:`reference_quantize` in float64, torch operations in the cache for all devices except CUDA, and Triton kernels for CUDA.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_eff.kernels import _group_quantization_torch as _torch
from lightning_eff.kernels import _launch

BITS = (1, 2, 3, 4, 8)
FUSED_BITS = (1, 2, 4, 8)  # for kernels that compute and pack in one pass
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A compressed tensor.

    Attributes:
        codes: uint8 of shape (num_groups * group_size * bits / 8,), in the layout of the module's docstring.
        scale: width of a step, float32 of shape (num_groups,). It is not finite if the group has a NaN or an infinity, or if
            max - min exceeds float32.
        minimum: least value of each group, float32 of shape (num_groups,). It is not finite if the group has a NaN or minus
            infinity.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        bits: bits per code, 1, 2, 3, 4 or 8.
        group_size: elements in a group.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    group_size: int

    @property
    def num_bytes(self) -> int:
        """The bytes of codes, scales and minima."""
        return self.codes.numel() + 4 * (self.scale.numel() + self.minimum.numel())


def quantize(x: Tensor, bits: int, group_size: int = 256, *, seed: int | None = None) -> Packed:
    """Compress ``x`` (see the module's docstring).

    The function does not check for NaN and infinity. They make the ``scale`` or the ``minimum`` of their group not finite, and
    its codes meaningless. If your data can have them, check these two small tensors.

    The random number of an element depends only on the seed and the element's index, and not on threads or launch geometry.
    CUDA uses Philox (Salmon et al. 2011). Other devices read a table of uniform numbers at an offset given by the seed, see
    :mod:`._group_quantization_torch`.

    Args:
        x: float32, bfloat16 or float16, with any shape and strides, read in the order of ``x.flatten()``. Arithmetic is
            always float32.
        bits: 1, 2, 3, 4 or 8.
        group_size: a power of two from 16 to 8192.
        seed: an integer in [0, 2^63) for stochastic rounding; None rounds to nearest.

    Returns:
        The compressed tensor on the device of ``x``, without a reference to ``x`` or its graph.

    Raises:
        ValueError: if ``bits``, ``group_size`` or ``seed`` is out of range.
        TypeError: if ``x`` has another dtype.
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    check(x, bits, group_size, seed)
    x = x.detach().contiguous()
    if _launch.uses_triton(x):
        codes, scale, minimum = _launch.triton_module("group_quantization").quantize(x, bits, group_size, seed)
    else:
        codes, scale, minimum = _torch.quantize(x.view(-1), bits, group_size, seed)
    return Packed(codes, scale, minimum, x.shape, x.dtype, bits, group_size)


def dequantize(packed: Packed) -> Tensor:
    """Decompress to a contiguous tensor of the original shape and dtype, computed in float32.

    Raises:
        ImportError: if ``packed`` is on CUDA and triton is not installed.
    """
    out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.codes.device)
    way = _launch.triton_module("group_quantization") if _launch.uses_triton(out) else _torch
    way.dequantize(packed.codes, packed.scale, packed.minimum, out.view(-1), packed.bits, packed.group_size)
    return out


def reference_quantize(x: Tensor, bits: int, group_size: int, noise: Tensor | None) -> Packed:
    """Reference for :func:`quantize` in float64, with the same ``x`` and ``bits``.

    Args:
        x: the tensor.
        bits: bits per code.
        group_size: elements in a group, a multiple of ``8 / bits``.
        noise: ``u`` for each element, in [0, 1), in the shape of ``x``; None means 1/2.
    """
    flat = x.detach().flatten().double()
    u = torch.full_like(flat, 0.5) if noise is None else noise.flatten().double()
    codes, scales, minima = [], [], []
    for x_g, u_g in zip(flat.split(group_size), u.split(group_size), strict=True) if flat.numel() else ():
        # scale = (max - min) / (2^b - 1)
        minimum, scale = x_g.min(), (x_g.max() - x_g.min()) / (2**bits - 1)
        # code = clamp(floor((x - min) / scale + u), 0, 2^b - 1)
        code = ((x_g - minimum) / scale + u_g).floor().clamp(0, 2**bits - 1) if scale > 0 else torch.zeros_like(x_g)
        codes.append(torch.nn.functional.pad(code, (0, group_size - len(code))))
        scales.append(scale)
        minima.append(minimum)
    code = torch.stack(codes) if codes else flat.new_zeros(0, group_size)
    code, stored = code.nan_to_num().to(torch.uint8), []
    for shift, width in planes(bits):
        parts = ((code >> shift) & (2**width - 1)).chunk(8 // width, dim=1)
        stored.append(torch.zeros_like(parts[0]))
        for k, part in enumerate(parts):
            stored[-1] |= part << (k * width)
    packed = torch.cat(stored, dim=1)
    scale, minimum = (torch.tensor(v, dtype=torch.float32, device=x.device) for v in (scales, minima))
    return Packed(packed.flatten(), scale, minimum, x.shape, x.dtype, bits, group_size)


def reference_dequantize(packed: Packed) -> Tensor:
    """Reference for :func:`dequantize` in float64."""
    length = packed.group_size // 8  # bytes for one bit per element
    stored = packed.codes.view(packed.scale.numel(), length * packed.bits)
    code = torch.zeros(packed.scale.numel(), packed.group_size, dtype=torch.uint8, device=stored.device)
    for shift, width in planes(packed.bits):
        plane = stored[:, length * shift : length * (shift + width)]
        parts = [(plane >> (k * width)) & (2**width - 1) for k in range(8 // width)]
        code |= torch.cat(parts, dim=1) << shift
    # decoded = min + scale code
    decoded = packed.minimum.double()[:, None] + packed.scale.double()[:, None] * code
    return decoded.flatten()[: packed.shape.numel()].to(packed.dtype).view(packed.shape)


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Return the planes that store a code, each as its shift and its width, a divisor of 8."""
    return ((0, 2), (2, 1)) if bits == 3 else ((0, bits),)


def check(x: Tensor, bits: int, group_size: int, seed: int | None, *, choices: tuple[int, ...] = BITS) -> None:
    """Raise if :func:`quantize` does not support these arguments."""
    if bits not in choices:
        raise ValueError(f"quantize({bits=}): expected one of {choices}.")
    if not 16 <= group_size <= 8192 or group_size & (group_size - 1):
        raise ValueError(f"quantize({group_size=}): expected a power of two from 16 to 8192, such as 256.")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"quantize({seed=}): expected an integer in [0, 2^63), or None to round to nearest.")
    if x.dtype not in DTYPES:
        raise TypeError(f"quantize(x of {x.dtype}): expected float32, bfloat16 or float16. Keep other tensors exact.")
