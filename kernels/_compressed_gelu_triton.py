"""GELU with a compressed derivative as Triton kernels: forward reads ``x`` once, backward reads ``g`` and the bytes."""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels._group_quantization_triton import (
    BLOCK,
    buffers,
    decode,
    encode,
    load_parts,
    over_groups,
    store_parts,
)
from lightning_eff.kernels.group_quantization import Packed


@triton.jit
def gelu_and_derivative(x, TANH: tl.constexpr):
    """Return ``gelu(x)`` and its derivative, float32."""
    if TANH:
        # y' = (1 + t)/2 + x/2 (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2),  t = tanh z = 2 sigmoid(2 z) - 1
        square = x * x
        portion = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
        derivative = portion + x * portion * (1.0 - portion) * slope
    else:
        # y' = Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi). With t = 1 / (1 + p |x| / sqrt 2), Phi(-|x|) is a polynomial of t times
        # the same exponential, within 1e-7 (Abramowitz & Stegun 7.1.26)
        exponential = tl.exp2(-0.7213475204444817 * x * x)
        t = 1.0 / (1.0 + 0.23164190 * tl.abs(x))
        tail = 0.5 * t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail *= exponential
        portion = tl.where(x < 0, tail, 1.0 - tail)
        derivative = portion + x * exponential * 0.3989422804014327
    return x * portion, derivative


@triton.jit(do_not_specialize=["num", "first", "seed"])
def forward_kernel(
    x,
    y,
    codes,
    scale,
    minimum,
    num,
    first,
    seed,
    TANH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute ``y = gelu(x)``, both (num,), and the codes, scales and minima of its derivative."""
    group = (tl.program_id(0) + first).to(tl.int64) * GROUPS
    left = (num - group * GROUP).to(tl.int32) if not EVEN else GROUPS * GROUP
    values = load_parts(x + group * GROUP, left, 8, GROUPS, GROUP, EVEN)
    results, derivatives = (), ()
    for j in tl.static_range(8):
        result, derivative = gelu_and_derivative(values[j], TANH)
        results, derivatives = results + (result,), derivatives + (derivative,)  # noqa: RUF005
    store_parts(y + group * GROUP, left, results, 8, GROUPS, GROUP, EVEN)
    codes += group * (GROUP * BITS // 8)
    encode(derivatives, codes, scale + group, minimum + group, left, seed, group, GROUPS, GROUP, BITS, STOCHASTIC, EVEN)


@triton.jit(do_not_specialize=["num", "first"])
def backward_kernel(
    g,
    codes,
    scale,
    minimum,
    dx,
    num,
    first,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute ``dx = g y'``, all (num,)."""
    V: tl.constexpr = 8 // BITS
    group = (tl.program_id(0) + first).to(tl.int64) * GROUPS
    left = (num - group * GROUP).to(tl.int32) if not EVEN else GROUPS * GROUP
    codes += group * (GROUP * BITS // 8)
    derivatives = decode(codes, scale + group, minimum + group, left, GROUPS, GROUP, BITS, EVEN)
    values = load_parts(g + group * GROUP, left, V, GROUPS, GROUP, EVEN)
    results = ()
    for v in tl.static_range(V):
        results = results + (values[v] * derivatives[v],)  # noqa: RUF005
    store_parts(dx + group * GROUP, left, results, V, GROUPS, GROUP, EVEN)


def forward(
    x: Tensor, approximate: str, bits: int, group_size: int, seed: int | None, *, block: int = BLOCK
) -> tuple[Tensor, Packed]:
    """Return ``gelu(x)`` and its compressed derivative."""
    x = x.contiguous()
    y, packed = torch.empty_like(x), buffers(x.numel(), bits, group_size, x.device)
    over_groups(
        forward_kernel,
        (x, y, *packed),
        x.numel(),
        seed or 0,
        group_size=group_size,
        block=block,
        TANH=approximate == "tanh",
        BITS=bits,
        STOCHASTIC=seed is not None,
    )
    return y, Packed(*packed, x.shape, x.dtype, bits, group_size)


def backward(g: Tensor, packed: Packed, *, block: int = BLOCK) -> Tensor:
    """Return ``dx`` with the shape of ``g`` and the dtype of ``x``."""
    dx = torch.empty(packed.shape, dtype=packed.dtype, device=g.device)
    held = packed.codes, packed.scale, packed.minimum
    over_groups(
        backward_kernel,
        (g.contiguous(), *held, dx),
        dx.numel(),
        group_size=packed.group_size,
        block=block,
        BITS=packed.bits,
    )
    return dx
