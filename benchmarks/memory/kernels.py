"""The kernels' bytes per second, against those of a copy on the same machine, in turns."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory.measure import CUDA, clock, spread
from lightning_eff.kernels.bit_mask import pack_mask, unpack_mask
from lightning_eff.kernels.compressed_gelu import compressed_gelu
from lightning_eff.kernels.compressed_norm import compressed_layer_norm
from lightning_eff.kernels.group_quantization import dequantize, quantize

GROUP = 256
WIDTH = 1024


def codes(num: int, bits: int) -> int:
    """Bytes of ``num`` elements at ``bits`` each, with a float32 scale and minimum for each group."""
    return num * bits // 8 + 8 * num // GROUP


def kernels(num: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes that must be read and written, what runs it), on ``num`` elements."""
    x = torch.randn(num // WIDTH, WIDTH, device=device).to(dtype)
    gradient, size = torch.randn_like(x), x.nbytes
    for bits in (8, 4, 2):
        packed = quantize(x, bits, GROUP, seed=1)
        yield f"quantize {bits}", size + codes(num, bits), lambda bits=bits: quantize(x, bits, GROUP, seed=1)
        yield f"dequantize {bits}", size + codes(num, bits), lambda packed=packed: dequantize(packed)
    mask = x > 0
    bytes_ = pack_mask(mask)
    yield "pack mask", num + num // 8, lambda: pack_mask(mask)
    yield "unpack mask", num + num // 8, lambda: unpack_mask(bytes_, mask.shape)
    weight = torch.ones(WIDTH, device=device, dtype=dtype)
    y = x.clone().requires_grad_()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "layer norm": lambda t: compressed_layer_norm(t, weight, bits=8, seed=1),
        "gelu": lambda t: compressed_gelu(t, bits=8, seed=1),
    }
    for name, function in functions.items():
        output = function(y)
        yield f"{name} forward", 2 * size + codes(num, 8), lambda function=function: function(y)
        yield (
            f"{name} backward",
            2 * size + codes(num, 8),
            lambda output=output: torch.autograd.grad(output, y, gradient, retain_graph=True),
        )


def seconds(function: Callable[[], Any], calls: int) -> float:
    """Of one call, the mean of some in a row."""
    began = clock()
    for _ in range(calls):
        function()
    return (clock() - began) / calls


def bandwidths(num: int, rounds: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each kernel: GB/s of the bytes it must move, and the fraction of a copy's GB/s in the same round."""
    device, dtype = (torch.device("cuda"), torch.bfloat16) if CUDA else (torch.device("cpu"), torch.float32)
    source = torch.randn(num, device=device).to(dtype)
    target, calls = torch.empty_like(source), 20 if CUDA else 1
    rows: list[dict[str, Any]] = []
    for name, nbytes, function in kernels(num, device, dtype):
        row: dict[str, Any] = {"kernel": name, "elements": num, "dtype": str(dtype)}
        try:
            seconds(function, 2)  # compiles
            rates, copies = [], []
            for _ in range(rounds):
                copies.append(2 * source.nbytes / seconds(lambda: target.copy_(source), calls) / 1e9)
                rates.append(nbytes / seconds(function, calls) / 1e9)
            row |= {"gb_per_second": spread(rates), "copy_gb_per_second": spread(copies)}
            row["of_copy"] = spread([rate / copy for rate, copy in zip(rates, copies, strict=True)])
            tell(
                f"{name}: {row['gb_per_second']['median']:.1f} GB/s, {row['of_copy']['median']:.2f} of a copy's"
                f" {row['copy_gb_per_second']['median']:.1f}"
            )
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            tell(f"{name}: {row['error']}")
        rows.append(row)
    return rows
