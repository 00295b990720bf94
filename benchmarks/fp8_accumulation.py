"""Emulate how Hopper sums float8 products, and measure what fast accumulation costs in accuracy.

    python -m benchmarks.fp8_accumulation [--dry]

It prints a table and writes `benchmarks/results/fp8_accumulation.json`. No float8 hardware is needed, and none was used.

**The model.** A tensor core adds 32 products and the running sum at once. It shifts all of them to the exponent of the largest
one and drops what lies below 2^-13 of it, so a sum keeps 14 bits (DeepSeek-AI 2024, arXiv:2412.19437, section 3.5.2). With
fast accumulation the running sum stays in the tensor core for the whole contraction. Otherwise cuBLAS adds it to a float32 sum
after every 128 products, and starts again from zero. NVIDIA documents neither the bits nor the interval. Both are arguments
of :func:`product`.

The operands are those of `FP8Precision`'s three products with tensorwise scaling: x and W in E4M3, the gradient in E5M2. The
error of a sum is relative to the exact product of the same codes, in the norm over the result. The casts' own error, relative
to the product of the numbers before the cast, is printed next to it. A biased operand has a mean of one standard deviation,
about as activations after ReLU have. If both operands are biased, partial sums grow with their length, and the bits that are
dropped have the same sign.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import described
from lightning_eff.kernels.fp8_cast import Codes, cast

OUT = Path(__file__).parent / "results" / "fp8_accumulation.json"
TOGETHER, BITS, INTERVAL = 32, 13, 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIDE, SEEDS = 64, 3
BIASED = ("none", "right", "both")  # operands


def truncated(x: Tensor, step: Tensor) -> Tensor:
    """Return ``x`` without what is below ``step``, toward zero."""
    return torch.trunc(x / step) * step


def product(a: Tensor, b: Tensor, *, interval: int | None, bits: int = BITS) -> Tensor:
    """Return ``a b^T`` in float64, summed as a tensor core does.

    Args:
        a: the numbers of float8 codes, float64, (R, K), K a multiple of 32.
        b: likewise, (C, K).
        interval: the number of products after which a float32 sum takes over, a multiple of 32; None for never, which is fast
            accumulation.
        bits: below the largest term that the tensor core keeps.
    """
    whole = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    running = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for start in range(0, a.shape[1], TOGETHER):
        here = slice(start, start + TOGETHER)
        terms = torch.cat([a[:, None, here] * b[None, :, here], running[..., None]], -1)
        # 2^exponent <= largest < 2^(exponent + 1)
        exponent = torch.frexp(terms.abs().amax(-1, keepdim=True))[1] - 1
        step = torch.ldexp(torch.ones_like(terms[..., :1]), exponent - bits)
        running = truncated(terms, step).sum(-1)
        running = truncated(running, torch.ldexp(torch.ones_like(running), torch.frexp(running)[1] - 1 - bits))
        if interval is not None and (start + TOGETHER) % interval == 0:
            whole += running.float()
            running.zero_()
    return whole.double() + running


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def measured(length: int, dtypes: tuple[torch.dtype, torch.dtype], *, biased: str, seed: int) -> dict[str, float]:
    """Return the errors of one product with sums of ``length``; ``biased`` is one of BIASED."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(SIDE, length, generator=generator) for _ in range(2))
    left, right = left + float(biased == "both"), right + float(biased != "none")
    codes = [cast(t, dtype, "tensor").rows for t, dtype in zip((left, right), dtypes, strict=True)]
    a, b = (c.codes.double() for c in codes if c is not None)
    exact = a @ b.t()
    real = left.double() @ right.double().t()
    decoded = [c.dequantized().double() for c in codes if isinstance(c, Codes)]
    return {
        "fast": error(product(a, b, interval=None), exact),
        "exact": error(product(a, b, interval=INTERVAL), exact),
        "casts": error(decoded[0] @ decoded[1].t(), real),
    }


def rows(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    found = []
    for length in lengths:
        for name, dtypes in (("E4M3 x E4M3", (E4M3, E4M3)), ("E5M2 x E4M3", (E5M2, E4M3))):
            for biased in BIASED:
                seeds = [measured(length, dtypes, biased=biased, seed=seed) for seed in range(SEEDS)]
                row: dict[str, Any] = {"length": length, "formats": name, "biased": biased}
                for key in seeds[0]:
                    values = [s[key] for s in seeds]
                    row[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
                found.append(row)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = rows((1024, 4096, 16384))
    print("sum of | formats | biased | fast | exact | casts")
    for row in found:
        errors = (f"{100 * row[key]['median']:.3f} %" for key in ("fast", "exact", "casts"))
        print(f"{row['length']} | {row['formats']} | {row['biased']} | {' | '.join(errors)}")
    if not given.dry:
        settings = {"together": TOGETHER, "bits": BITS, "interval": INTERVAL, "side": SIDE, "seeds": SEEDS}
        OUT.write_text(json.dumps({"settings": settings, "machine": described(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
