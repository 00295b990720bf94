"""Group-wise affine quantisation to 1, 2, 3, 4 or 8 bits, packed (ActNN: Chen et al. 2021, arXiv:2104.14129, section 4).

A tensor is cut, in memory order, into groups of ``group_size`` consecutive elements. Each group keeps its minimum and
the width of a step in float32, and each element a code of ``bits`` bits:

    scale   = (max - min) / (2^bits - 1)
    code    = clamp(floor((x - min) / scale + u), 0, 2^bits - 1)        u = 1/2: nearest; u ~ U(0, 1): stochastic
    decoded = min + scale code

With stochastic rounding ``E[decoded] = x``, whatever the group; the error of an element is below one step, that of
nearest rounding below half a step. A group of equal values has scale 0 and decodes exactly.

Inside a group of ``L = group_size * bits / 8`` bytes, byte ``p`` holds elements ``p, p + L, p + 2 L, ...``, the first of
them in the lowest bits: no element moves between vector lanes, neither on a CPU nor on a GPU. 3 bits are held as two planes,
the lower two bits of all elements of the group and then their upper one, each as above. The last group is filled up with
codes 0.

Three ways compute the same codes, up to a code on the boundary between two: :func:`reference_quantize`, in float64;
in-cache torch operations, on every device but CUDA; one Triton kernel each way, on CUDA.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_eff.kernels import _group_quantization_torch as _torch
from lightning_eff.kernels import _launch

BITS = (1, 2, 3, 4, 8)
FUSED_BITS = (1, 2, 4, 8)  # of operations that pack in the pass that computes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in compressed form.

    Attributes:
        codes: uint8 of shape (num_groups * group_size * bits / 8,), laid out as the module's docstring says.
        scale: the width of a step, float32 of shape (num_groups,). Not finite where the group held a NaN or an
            infinity, or where max - min is beyond float32.
        minimum: each group's least value, float32 of shape (num_groups,). Not finite where the group held a NaN or
            minus infinity.
        shape: of the tensor.
        dtype: of the tensor.
        bits: of a code: 1, 2, 3, 4 or 8.
        group_size: elements of a group.
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
        """Bytes of codes, scales and minima."""
        return self.codes.numel() + 4 * (self.scale.numel() + self.minimum.numel())


def quantize(x: Tensor, bits: int, group_size: int = 256, *, seed: int | None = None) -> Packed:
    """Compress ``x`` (see the module's docstring).

    NaN and infinity are not looked for: they make the ``scale`` or the ``minimum`` of their group not finite, and its
    codes meaningless. Whoever compresses data that may hold them looks at these two, which are small.

    Args:
        x: float32, bfloat16 or float16, of any shape and strides; elements are taken in the order of ``x.flatten()``.
            Arithmetic is float32 in every case.
        bits: 1, 2, 3, 4 or 8.
        group_size: a power of two from 16 to 8192.
        seed: None rounds to nearest. An integer in [0, 2^63) rounds stochastically; the random number of an element
            is a function of the seed and of the element's index alone, so the codes depend neither on the number of
            threads nor on launch geometry. CUDA draws from Philox (Salmon et al. 2011); other devices read a fixed
            table of uniform numbers at an offset that the seed gives, see :mod:`._group_quantization_torch`.

    Returns:
        The compressed tensor, on the device of ``x``, with no reference to ``x`` nor to its graph.

    Raises:
        ValueError: ``bits``, ``group_size`` or ``seed`` out of range.
        TypeError: ``x`` of another dtype.
        ImportError: ``x`` on CUDA and triton not installed.
    """
    check(x, bits, group_size, seed)
    x = x.detach().contiguous()
    if _launch.uses_triton(x):
        codes, scale, minimum = _launch.triton_module("group_quantization").quantize(x, bits, group_size, seed)
    else:
        codes, scale, minimum = _torch.quantize(x.view(-1), bits, group_size, seed)
    return Packed(codes, scale, minimum, x.shape, x.dtype, bits, group_size)


def dequantize(packed: Packed) -> Tensor:
    """The tensor that ``packed`` stands for: contiguous, of its shape and dtype, computed in float32.

    Raises:
        ImportError: ``packed`` on CUDA and triton not installed.
    """
    out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.codes.device)
    way = _launch.triton_module("group_quantization") if _launch.uses_triton(out) else _torch
    way.dequantize(packed.codes, packed.scale, packed.minimum, out.view(-1), packed.bits, packed.group_size)
    return out


def reference_quantize(x: Tensor, bits: int, group_size: int, noise: Tensor | None) -> Packed:
    """What :func:`quantize` computes, in float64 and one plain step after another.

    Args:
        x: as for :func:`quantize`.
        bits: as for :func:`quantize`.
        group_size: elements of a group; a multiple of ``8 / bits``.
        noise: ``u`` of each element, in [0, 1), of the shape of ``x``; None is 1/2 everywhere.
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
    """What :func:`dequantize` computes, in float64 and one plain step after another."""
    length = packed.group_size // 8  # bytes of a bit of each element
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
    """The parts that a code is held in: how far each is shifted, and its width, a divisor of 8."""
    return ((0, 2), (2, 1)) if bits == 3 else ((0, bits),)


def check(x: Tensor, bits: int, group_size: int, seed: int | None, *, choices: tuple[int, ...] = BITS) -> None:
    """Raise if :func:`quantize` cannot take these arguments."""
    if bits not in choices:
        raise ValueError(f"quantize({bits=}): expected one of {choices}.")
    if not 16 <= group_size <= 8192 or group_size & (group_size - 1):
        raise ValueError(f"quantize({group_size=}): expected a power of two from 16 to 8192, such as 256.")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"quantize({seed=}): expected an integer in [0, 2^63), or None to round to nearest.")
    if x.dtype not in DTYPES:
        raise TypeError(f"quantize(x of {x.dtype}): expected float32, bfloat16 or float16; keep other tensors exact.")
