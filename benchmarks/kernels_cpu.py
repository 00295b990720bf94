"""Ways of compressing activations on a CPU, timed in turn, and what the chosen one adds to a training step.

    python benchmarks/kernels_cpu.py [--rounds 7] [--threads 1] [--out kernels_cpu.json]

First table: nanoseconds for each element of a 4-bit quantisation with stochastic rounding and of its inverse, for three
ways that give the same kind of codes, on one tensor; ratios to the chosen way, taken within each round:

- ``operations``: plain torch operations on the whole tensor, a fresh random number for each element;
- ``fbgemm``: torch's row-wise 8-bit prepack and unpack of recommendation models, on halves of a step of noise (8 bits and
  rounding to nearest are all that it has; its 4-bit form keeps scale and minimum in half precision, which biases);
- ``pieces``: `lightning_eff.kernels.group_quantization`, which works in a cache with a table of noise.

Second table: a training step of a GPT-2 with every float tensor that autograd saves and that is no parameter compressed by
the chosen way, against the exact step, by the ratio of turns A B A B. No rule of what should stay exact, no ledger: that
is the compressing technique's own, and is measured with it.

With one thread, times are the process's own CPU seconds, which other load on the machine disturbs less than the clock's.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.kernels.group_quantization import dequantize, quantize

GROUP = 256
clock = time.perf_counter


def operations(x: Tensor, bits: int, seed: int) -> Callable[[], Tensor]:
    """The formula as one writes it first; returns the inverse."""
    levels, groups = 2**bits - 1, x.view(-1, GROUP)
    minimum, maximum = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((maximum - minimum) / levels).clamp_min(1e-30)
    code = ((groups - minimum) / scale + torch.rand_like(groups)).floor().clamp(0, levels).to(torch.uint8)
    packed = code[:, ::2] | (code[:, 1::2] << 4) if bits == 4 else code
    shape = x.shape

    def inverse() -> Tensor:
        back = packed
        if bits == 4:
            back = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, GROUP)
        return (back * scale + minimum).view(shape)

    return inverse


def fbgemm(x: Tensor, bits: int, seed: int) -> Callable[[], Tensor]:
    """Row-wise 8 bits by fbgemm's operators, with dither added before."""
    groups, shape = x.view(-1, GROUP), x.shape
    half = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 255
    noisy = torch.addcmul(groups, torch.rand_like(groups).sub_(0.5), half)
    packed = torch.ops.quantized.embedding_bag_byte_prepack(noisy)
    return lambda: torch.ops.quantized.embedding_bag_byte_unpack(packed).view(shape)


def pieces(x: Tensor, bits: int, seed: int) -> Callable[[], Tensor]:
    packed = quantize(x, bits, GROUP, seed=seed)
    return lambda: dequantize(packed)


WAYS = {"operations": operations, "fbgemm": fbgemm, "pieces": pieces}


def time_ways(elements: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """ns for each element, quantising and dequantising, of each way in each round."""
    x = torch.randn(elements // GROUP, GROUP)
    found: dict[str, dict[str, list[float]]] = {way: {"quantize": [], "dequantize": []} for way in WAYS}
    for round_ in range(rounds + 1):
        for way, function in WAYS.items():
            start = clock()
            inverse = function(x, 4, round_)
            middle = clock()
            inverse()
            end = clock()
            if round_:
                found[way]["quantize"].append(1e9 * (middle - start) / elements)
                found[way]["dequantize"].append(1e9 * (end - middle) / elements)
    return found


def time_steps(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of exact and of compressed steps, in turn, and the bytes that went through the compression."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        bos_token_id=None,
        eos_token_id=None,
        vocab_size=args.vocabulary,
        n_positions=args.length,
        n_embd=args.dim,
        n_layer=args.layers,
        n_head=4,
        activation_function=args.activation,
    )
    model: nn.Module = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, args.vocabulary, (args.batch_size, args.length))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    counted = {"elements": 0, "tensors": 0}
    seed = 0

    def pack(x: Tensor) -> Any:
        nonlocal seed
        if x.dtype != torch.float32 or x.numel() < 1024 or x.untyped_storage().data_ptr() in parameters:
            return x
        seed += 1
        counted["elements"] += x.numel()
        counted["tensors"] += 1
        return quantize(x, args.bits, GROUP, seed=seed)

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else dequantize(kept)

    def step(compressed: bool) -> float:
        start = clock()
        if compressed:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = model(input_ids=ids, labels=ids).loss
        else:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock() - start

    for compressed in (False, True):
        step(compressed)
    counted.update(elements=0, tensors=0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for compressed in (False, True):
            seconds[compressed].append(step(compressed))
    return {
        "exact_seconds": seconds[False],
        "compressed_seconds": seconds[True],
        "elements": counted["elements"] // args.rounds,
        "tensors": counted["tensors"] // args.rounds,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    global clock
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--elements", type=int, default=2**21, help="of the tensor in the first table")
    parser.add_argument("--bits", type=int, default=4, help="in the second table")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--activation", default="gelu_new", help="as transformers names it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.threads == 1:
        clock = time.process_time
    ways = time_ways(args.elements, args.rounds)
    both = {way: [sum(pair) for pair in zip(*times.values(), strict=True)] for way, times in ways.items()}
    table: dict[str, Any] = {}
    print(f"{'way':<12} {'quantise':>9} {'back':>6} ns/element   both, over `pieces`")
    for way, times in ways.items():
        ratio = [a / b for a, b in zip(both[way], both["pieces"], strict=True)]
        table[way] = {name: spread(values) for name, values in times.items()} | {"over_pieces": spread(ratio)}
        q, d = (table[way][name]["median"] for name in ("quantize", "dequantize"))
        print(
            f"{way:<12} {q:9.2f} {d:6.2f}              {statistics.median(ratio):6.2f} ({min(ratio):.2f} - {max(ratio):.2f})"
        )
    steps = time_steps(args)
    ratio = [b / a for a, b in zip(steps["exact_seconds"], steps["compressed_seconds"], strict=True)]
    print(
        f"\nstep: exact {1e3 * statistics.median(steps['exact_seconds']):.0f} ms, compressed to {args.bits} bits"
        f" {1e3 * statistics.median(steps['compressed_seconds']):.0f} ms, ratio {statistics.median(ratio):.3f}"
        f" ({min(ratio):.3f} - {max(ratio):.3f}); {steps['tensors']} tensors, {steps['elements'] / 1e6:.1f} M elements"
    )
    result = {
        "benchmark": "kernels_cpu",
        "clock": clock.__name__,
        "ways": table,
        "step": steps | {"ratio": spread(ratio)},
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "device": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
