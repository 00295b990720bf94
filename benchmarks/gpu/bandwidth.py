"""Every kernel's bytes per second against those of a copy on the same machine, in turns.

Counted are the bytes that must be read and written, each once (twice where a first pass finds a scale). Where products
dominate, TFLOP/s count instead, against those of a product in bfloat16.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.timing import device, repetitions, seconds, spread
from benchmarks.gpu.work import Row, Skip, Work
from lightning_eff.kernels import fp8_cast, fp8_matmul
from lightning_eff.kernels.bf16_adamw import adamw_
from lightning_eff.kernels.bit_mask import pack_mask, pack_pair, unpack_mask, unpack_pair
from lightning_eff.kernels.compressed_gelu import compressed_gelu
from lightning_eff.kernels.compressed_norm import compressed_layer_norm, compressed_rms_norm
from lightning_eff.kernels.group_quantization import dequantize, quantize
from lightning_eff.kernels.int8_quantization import quantize_rows
from lightning_eff.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_eff.kernels.norm import layer_norm, rms_norm
from lightning_eff.kernels.stochastic_rounding import stochastic_round

GROUP = 256


class Kernel(NamedTuple):
    """One to be timed.

    Attributes:
        name: of the row.
        module: of lightning_eff.kernels.
        nbytes: that must be moved.
        build: makes its operands, and what runs it.
        flops: of products, where they dominate.
    """

    name: str
    module: str
    nbytes: float
    build: Callable[[], Callable[[], Any]]
    flops: float = 0.0


def codes(num: int, bits: int) -> int:
    """Bytes of ``num`` elements at ``bits`` each, with a float32 scale and minimum for each group."""
    return num * bits // 8 + 8 * num // GROUP


def kernels(num: int, width: int, where: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    """All of them, on ``num`` elements in rows of ``width``."""
    size = num * torch.empty((), dtype=dtype).element_size()

    def normal(dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(num // width, width, device=where).to(dtype)

    for bits in (8, 4, 2):

        def quantizing(bits: int = bits) -> Callable[[], Any]:
            x = normal()
            return lambda: quantize(x, bits, GROUP, seed=1)

        def dequantizing(bits: int = bits) -> Callable[[], Any]:
            packed = quantize(normal(), bits, GROUP, seed=1)
            return lambda: dequantize(packed)

        yield Kernel(f"quantize {bits}", "group_quantization", size + codes(num, bits), quantizing)
        yield Kernel(f"dequantize {bits}", "group_quantization", size + codes(num, bits), dequantizing)

    def packing() -> Callable[[], Any]:
        mask = normal() > 0
        return lambda: pack_mask(mask)

    def unpacking() -> Callable[[], Any]:
        packed, shape = pack_mask(normal() > 0), torch.Size((num // width, width))
        return lambda: unpack_mask(packed, shape)

    def two_values() -> Tensor:
        return (normal() > 0).to(dtype) * 1.25

    def packing_pair() -> Callable[[], Any]:
        x = two_values()
        return lambda: pack_pair(x)

    def unpacking_pair() -> Callable[[], Any]:
        packed = pack_pair(two_values())
        assert packed is not None
        return lambda: unpack_pair(packed)

    yield Kernel("pack mask", "bit_mask", num + num // 8, packing)
    yield Kernel("unpack mask", "bit_mask", num + num // 8, unpacking)
    yield Kernel("pack two values", "bit_mask", 2 * size + num // 8, packing_pair)
    yield Kernel("unpack two values", "bit_mask", size + num // 8, unpacking_pair)

    weight = torch.ones(width, device=where, dtype=dtype)
    eight = codes(num, 8)
    functions: dict[str, tuple[str, int, Callable[[Tensor], Tensor]]] = {
        "layer norm": ("norm", 0, lambda t: layer_norm(t, weight, weight)),
        "rms norm": ("norm", 0, lambda t: rms_norm(t, weight)),
        "layer norm, 8 bits kept": (
            "compressed_norm",
            eight,
            lambda t: compressed_layer_norm(t, weight, bits=8, seed=1),
        ),
        "rms norm, 8 bits kept": ("compressed_norm", eight, lambda t: compressed_rms_norm(t, weight, bits=8, seed=1)),
        "gelu, 8 bits kept": ("compressed_gelu", eight, lambda t: compressed_gelu(t, bits=8, seed=1)),
    }
    for name, (module, kept, function) in functions.items():

        def forward(function: Callable[[Tensor], Tensor] = function) -> Callable[[], Any]:
            x = normal().requires_grad_()
            return lambda: function(x)

        def backward(function: Callable[[Tensor], Tensor] = function) -> Callable[[], Any]:
            x, g = normal().requires_grad_(), normal()
            y = function(x)
            return lambda: torch.autograd.grad(y, x, g, retain_graph=True)

        yield Kernel(f"{name}: forward", module, 2 * size + kept, forward)
        yield Kernel(f"{name}: backward", module, 2 * size + (kept or size), backward)

    def rounding() -> Callable[[], Any]:
        x, out = normal(torch.float32), normal(torch.bfloat16)
        return lambda: stochastic_round(x, seed=1, out=out)

    def adamw() -> Callable[[], Any]:
        p, g, m, v = (normal(torch.bfloat16) for _ in range(4))
        v.abs_()
        settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3, "seed": 1}
        return lambda: adamw_(p, g, m, v, lr=1e-4, **settings)

    def to_int8() -> Callable[[], Any]:
        x, factor = normal(torch.float32), torch.rand(width, device=where)
        return lambda: quantize_rows(x, factor=factor, seed=1)

    yield Kernel("int8 by rows", "int8_quantization", 5 * num + 4 * num // width, to_int8)
    yield Kernel("stochastic rounding", "stochastic_rounding", 6 * num, rounding)
    yield Kernel("adamw in bfloat16", "bf16_adamw", 14 * num, adamw)
    for by, reads in (("tensor", 2), ("rows", 2), ("groups", 1), ("blocks", 1)):

        def casting(by: Any = by) -> Callable[[], Any]:
            x = normal()
            return lambda: fp8_cast.cast(x, torch.float8_e4m3fn, by, columns=True)

        yield Kernel(f"cast to float8 by {by}, and transposed", "fp8_cast", reads * size + 2 * num, casting)
    rows, out = num // width, width

    def product() -> Callable[[], Any]:
        pairs = [
            fp8_cast.cast(torch.randn(n, width, device=where), torch.float8_e4m3fn, by).rows
            for n, by in ((rows, "groups"), (out, "blocks"))
        ]
        a, b = pairs
        assert a is not None and b is not None
        return lambda: fp8_matmul.matmul(a, b, torch.bfloat16)

    def cross_entropy() -> Callable[[], Any]:
        classes = 8 * width
        x = (normal(torch.bfloat16)[: max(1, rows // 8)]).requires_grad_()
        head = (torch.randn(classes, width, device=where) / width**0.5).to(torch.bfloat16).requires_grad_()
        target = torch.randint(0, classes, (len(x),), device=where)
        return lambda: torch.autograd.grad(linear_cross_entropy(x, head, target), (x, head))

    moved = rows * width + out * width + 2 * rows * out
    yield Kernel("product in float8, blocks", "fp8_matmul", moved, product, 2.0 * rows * out * width)
    some = max(1, rows // 8)
    work = 6.0 * some * width * 8 * width  # logits, and both gradients
    yield Kernel("linear cross-entropy", "linear_cross_entropy", 4 * some * width + 32 * width**2, cross_entropy, work)


def run(work: Work) -> None:
    where = device(work.tiny)
    dtype = torch.float32 if work.tiny else torch.bfloat16
    num, width = (2**12, 64) if work.tiny else (2**27, 4096)
    if not work.tiny:
        copy_of, product_of = copying(num, where, dtype), multiplying(width, where)
    else:
        copy_of, product_of = copying(num, where, dtype), multiplying(64, where)
    for kernel in kernels(num, width, where, dtype):
        work.row(kernel.name, lambda kernel=kernel: against(kernel, copy_of, product_of, where, work.tiny), needs=6)


def copying(num: int, where: torch.device, dtype: torch.dtype) -> tuple[float, Callable[[], Any]]:
    """Bytes moved by a copy, and the copy."""
    source = torch.randn(num, device=where).to(dtype)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes, lambda: target.copy_(source)


def multiplying(size: int, where: torch.device) -> tuple[float, Callable[[], Any]]:
    """FLOP of a product in bfloat16, and the product."""
    a, b = (torch.randn(size, size, device=where).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3, lambda: torch.mm(a, b, out=out)


def against(
    kernel: Kernel,
    copy_of: tuple[float, Callable[[], Any]],
    product_of: tuple[float, Callable[[], Any]],
    where: torch.device,
    tiny: bool,
) -> Row:
    """The kernel and what it is held against, in turns."""
    if kernel.module == "fp8_matmul" and where.type == "cuda":
        found = torch.cuda.get_device_capability()
        if found < fp8_matmul.CAPABILITY:
            raise Skip(f"needs compute capability 9.0, and this device has {found[0]}.{found[1]}")
    program = kernel.build()
    amount, other = product_of if kernel.flops else copy_of
    times, others = repetitions(program, where, tiny), repetitions(other, where, tiny)
    ours, theirs = [], []
    for _ in range(2 if tiny else 5):
        theirs.append(amount / seconds(other, where, others))
        ours.append(seconds(program, where, times))
    row: Row = {"module": kernel.module, "gigabytes_per_second": spread([kernel.nbytes / t / 1e9 for t in ours])}
    if kernel.flops:
        row["tflops"] = spread([kernel.flops / t / 1e12 for t in ours])
        row["of_product"] = spread([kernel.flops / t / other for t, other in zip(ours, theirs, strict=True)])
    else:
        row["copy"] = spread([rate / 1e9 for rate in theirs])
        row["of_copy"] = spread([kernel.nbytes / t / rate for t, rate in zip(ours, theirs, strict=True)])
    return row
