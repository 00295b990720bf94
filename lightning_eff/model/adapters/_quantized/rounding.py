"""Weights in NF4 or int8 and back, by bitsandbytes (Dettmers et al. 2022, 2023), and the product with them.

32-bit scales are kept as bytes, so that ``module.to(torch.bfloat16)`` does not round them.
"""

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from bitsandbytes import functional as bnb
from torch import Tensor
from typing_extensions import override

#: The number of weights per scale, and of scales per nested scale.
BLOCK, NESTED = 64, 256
STEP = 7.874016e-3  #: bitsandbytes' 1 / 127
_KEPT = (torch.float32, torch.float16, torch.bfloat16)


def quantized(weight: Tensor, bits: int) -> dict[str, Tensor]:
    """``weight`` (N, K) as byte tensors by name.

    With 4 bits, ``W ~ c NF4[code]`` with one c per 64 weights, itself in 8 bits (QLoRA's double quantisation): 0.52 bytes per
    weight. With 8 bits, ``W ~ c code / 127`` with one c = max |W| per row.
    """
    weight = weight.detach().contiguous()
    if bits == 8:
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
        return {"codes": codes.view(torch.uint8), "scales": _bytes(scales)}
    given = weight if weight.dtype in _KEPT else weight.to(torch.float32)
    given = F.pad(given.flatten(), (0, weight.numel() % 2))  # a byte holds two codes
    codes, state = bnb.quantize_4bit(given, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    nested: Any = state.state2
    return {
        "codes": codes.flatten(),
        "scales": state.absmax,
        "nested_scales": _bytes(nested.absmax),
        "offset": _bytes(cast(Tensor, state.offset)),
    }


def dequantized(stored: Mapping[str, Tensor], bits: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The rounded weight of ``shape`` (N, K), from the tensors that :func:`quantized` returned."""
    codes, scales = stored["codes"], stored["scales"]
    if bits == 8:
        if codes.device.type == "cpu":  # the same products in the same order, but the second one in place
            return (codes.view(torch.int8) * _floats(scales)[:, None]).mul_(STEP).to(dtype)
        return bnb.int8_vectorwise_dequant(codes.view(torch.int8), _floats(scales)).to(dtype)
    # the compiler needs a constant; making one takes longer than everything else here
    nf4, dynamic = (_made if torch.compiler.is_compiling() else _maps)(str(codes.device))
    nested = bnb.QuantState(
        absmax=_floats(stored["nested_scales"]), blocksize=NESTED, code=dynamic, dtype=torch.float32
    )
    state = bnb.QuantState(
        absmax=scales,
        shape=torch.Size([2 * codes.numel()]),
        code=nf4,
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype if dtype in _KEPT else torch.float32,
        offset=_floats(stored["offset"])[0],
        state2=nested,
    )
    return bnb.dequantize_4bit(codes[:, None], state).flatten()[: shape[0] * shape[1]].view(shape).to(dtype)


@torch.compiler.assume_constant_result  # the compiler cannot trace it
def _made(device: str) -> tuple[Tensor, Tensor]:
    return _maps(device)


@functools.cache
def _maps(device: str) -> tuple[Tensor, Tensor]:
    """The values of the codes of NF4, and of the codes of its scales."""
    nf4 = bnb.get_4bit_type("nf4", device=torch.device(device))
    return nf4, bnb.create_dynamic_map().to(device)


def _bytes(t: Tensor) -> Tensor:
    return t.detach().to(torch.float32).reshape(-1).clone().view(torch.uint8)


def _floats(t: Tensor) -> Tensor:
    return t.view(torch.float32)


class Product(torch.autograd.Function):
    """``x W^T + b`` and ``dx = dy W``, with W computed both times and not kept in between."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, bias: Tensor | None, bits: int, shape: tuple[int, int], names: tuple[str, ...], *stored: Tensor
    ) -> Tensor:
        weight = dequantized(dict(zip(names, stored, strict=True)), bits, shape, x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, bias, ctx.bits, ctx.shape, names, *stored = inputs
        ctx.stored = dict(zip(names, stored, strict=True))  # the module's buffers, which outlive the pass
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (grad @ dequantized(ctx.stored, ctx.bits, ctx.shape, grad.dtype)).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_bias = grad.flatten(0, -2).sum(0).to(ctx.dtypes[1]) if grad.ndim > 1 else grad.to(ctx.dtypes[1])
        return of_x, of_bias, None, None, None, *(None for _ in ctx.stored)
