"""FP8Precision against bfloat16 and torchao on a GPU: casts, linear maps, GPT blocks, GPT-2 124M and a 1B Llama.

    python -m benchmarks.precision [--out precision.json] [--only casts linear block gpt2 llama] [--rounds 7]
    python -m benchmarks.precision --tiny      # seconds on a CPU, with backend="emulated": it only shows that it runs

Every figure is a step of forward and backward (and of the optimizer, end to end), timed against a baseline in turns
A B A B on modules of their own with the same weights; a ratio is taken within each round, and its median and range over
the rounds are kept. A baseline against itself shows the noise. Each case runs as it is and compiled (``torch.compile``),
both sides alike. Times are set against two ceilings that are measured first: the device's best bfloat16 matrix product in
TFLOP/s, and the bandwidth of a copy in GB/s. "head" stays in bfloat16; "small" is not skipped, so that sizes which do not
pay are seen.

TFLOP/s count the products of a step: 6 M K N of a linear map on M tokens, attention's causal half, and 6 for each parameter
of a linear map and each token end to end. GB/s of a cast count its input once and what it writes.
"""

import argparse
import copy
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from examples.gpt.module import Block
from lightning_eff.bench.machine import fingerprint, measured_peak
from lightning_eff.precision._linear.maps import linear_maps
from lightning_eff.precision._scaling.casts import Scaling, cast_pair
from lightning_eff.precision.fp8 import FP8Precision

SECTIONS = ("casts", "linear", "block", "gpt2", "llama")


class Case(NamedTuple):
    """What is timed.

    Attributes:
        name: such as "block d=4096".
        build: makes the module, on the default device.
        step: a step's loss from the module.
        flops: of a step's products.
        tokens: of a step.
        whole: a model, whose head stays in bfloat16 and whose step ends with AdamW's.
    """

    name: str
    build: Callable[[], nn.Module]
    step: Callable[[nn.Module], Tensor]
    flops: float
    tokens: int
    whole: bool = False


def arms(tiny: bool) -> dict[str, dict[str, Any]]:
    """Arguments of FP8Precision by name; "bf16" is none of them."""
    backend = "emulated" if tiny else "scaled_mm"
    found: dict[str, dict[str, Any]] = {
        "tensorwise": {"backend": backend},
        "tensorwise delayed": {"amax": "delayed", "backend": backend},
        "rowwise": {"scaling": "rowwise", "backend": backend},
    }
    if tiny:
        found["blockwise"] = {"scaling": "blockwise", "backend": backend}
    if version("torchao") is not None:
        found["torchao tensorwise"] = {"backend": "torchao"}
        found["torchao rowwise"] = {"scaling": "rowwise", "backend": "torchao"}
    return found


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pairs(names: list[str]) -> list[tuple[str, str]]:
    """(baseline, arm): bfloat16 against itself and all others, and ours against torchao's of the same scaling."""
    against = [(f"torchao {name}", name) for name in ("tensorwise", "rowwise") if f"torchao {name}" in names]
    return [("bf16", name) for name in ("bf16", *names)] + against


# -- timing


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """The mean of some runs in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repetitions


def fresh(compiled: bool) -> None:
    """Forget what was compiled: many modules of one class would exceed the limit, and run on in eager mode in silence."""
    if compiled:
        torch.compiler.reset()


def spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def repetitions_for(run: Callable[[], Any], device: torch.device, tiny: bool) -> int:
    """So many that a turn takes about a fifth of a second."""
    return 1 if tiny else max(1, min(200, round(0.2 / seconds(run, device, 2))))


class _Backward:
    """All that a plugin needs of a LightningModule to run a backward pass."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Arm:
    """A module of its own that runs steps under a precision plugin.

    Args:
        case: see above.
        module: copied.
        settings: FP8Precision's arguments, or None.
        compiled: step through ``torch.compile``.
    """

    def __init__(
        self, case: Case, module: nn.Module, settings: dict[str, Any] | None, device: torch.device, compiled: bool
    ) -> None:
        self.case = case
        self.module = copy.deepcopy(module)
        self.precision: Precision = MixedPrecision("bf16-mixed", device.type)
        if settings is not None:
            self.precision = FP8Precision(skip=("head",) if case.whole else (), **settings)
        self.precision.convert_module(self.module)
        self.run = torch.compile(self.module) if compiled else self.module
        self.optimizer = None
        if case.whole:
            self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(self) -> None:
        with self.precision.forward_context():
            loss = self.case.step(self.run)
        self.precision.backward(loss, _Backward(), None)  # pyright: ignore[reportArgumentType]
        if self.optimizer is not None:
            self.optimizer.step()
        for p in self.module.parameters():
            p.grad = None
        if isinstance(self.precision, FP8Precision) and self.precision._history is not None:
            self.precision._history.advance()

    def close(self) -> None:
        self.precision.teardown()


def compare(
    case: Case, names: tuple[str, str], all_arms: dict[str, dict[str, Any]], compiled: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """A case under a baseline and an arm, in turns."""
    fresh(compiled)
    torch.manual_seed(0)
    with torch.device(args.device):
        module = case.build()
    sides = [Arm(case, module, all_arms.get(name), args.device, compiled) for name in names]
    for side in sides:
        for _ in range(1 if args.tiny else 3):
            side.step()
    repetitions = max(repetitions_for(side.step, args.device, args.tiny) for side in sides)
    times: list[list[float]] = [[], []]
    for round_ in range(args.rounds):
        for i in (0, 1) if round_ % 2 == 0 else (1, 0):
            times[i].append(seconds(sides[i].step, args.device, repetitions))
    for side in sides:
        side.close()
    ratios = [a / b for a, b in zip(*times, strict=True)]
    median = statistics.median(times[1])
    return {
        "case": case.name,
        "compiled": compiled,
        "baseline": names[0],
        "arm": names[1],
        "baseline_ms": spread([1e3 * t for t in times[0]]),
        "ms": spread([1e3 * t for t in times[1]]),
        "speedup": spread(ratios),
        "tflops": case.flops / median / 1e12,
        "share_of_bf16_ceiling": case.flops / median / args.ceiling.flops,
        "tokens_per_second": case.tokens / median,
        "repetitions": repetitions,
    }


# -- ceilings and casts


def copy_bandwidth(device: torch.device, tiny: bool) -> float:
    """Bytes read and written in a second by a copy."""
    x = torch.zeros(2**20 if tiny else 2**29, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    y.copy_(x)
    return max(2 * x.numel() / seconds(lambda: y.copy_(x), device, 5) for _ in range(5))


def casts(args: argparse.Namespace, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Casts of a bfloat16 operand for both of its products."""
    for d in args.sizes:
        x = torch.randn(args.tokens, d, device=args.device, dtype=torch.bfloat16)
        for scaling in ("tensorwise", "rowwise", "blockwise"):
            for compiled in args.compiled:

                def cast(x: Tensor, scaling: Scaling = scaling) -> list[Tensor]:
                    pair = cast_pair(x, torch.float8_e4m3fn, scaling, columns=True)
                    assert pair.rows is not None and pair.columns is not None
                    return [*pair.rows, *pair.columns]

                fresh(compiled)
                run = torch.compile(cast) if compiled else cast
                nbytes = sum(t.numel() * t.element_size() for t in (x, *run(x)))
                repetitions = repetitions_for(lambda: run(x), args.device, args.tiny)  # noqa: B023
                times = [seconds(lambda: run(x), args.device, repetitions) for _ in range(args.rounds)]  # noqa: B023
                rate = [nbytes / t / 1e9 for t in times]
                yield {
                    "case": f"cast d={d}",
                    "arm": scaling,
                    "compiled": compiled,
                    "gigabytes_per_second": spread(rate),
                    "share_of_copy": 1e9 * statistics.median(rate) / bandwidth,
                }


# -- cases


def cases(args: argparse.Namespace) -> Iterator[Case]:
    tokens, device = args.tokens, args.device
    for d in args.sizes:
        x = torch.randn(tokens, d, device=device, dtype=torch.bfloat16)

        def through(m: nn.Module, x: Tensor = x) -> Tensor:
            return m(x.detach().requires_grad_()).float().square().mean()

        if "linear" in args.only:
            yield Case(
                f"linear d={d}",
                lambda d=d: nn.Sequential(nn.Linear(d, d, bias=False)),
                through,
                6 * tokens * d * d,
                tokens,
            )
        if "block" in args.only:
            length = min(args.length, tokens)
            batch = x.view(-1, length, d)

            def through_block(m: nn.Module, x: Tensor = batch) -> Tensor:
                return m(x.detach().requires_grad_()).float().square().mean()

            yield Case(
                f"block d={d}",
                lambda d=d, length=length: nn.Sequential(Block(d, max(1, d // 128), length, 0.0)),
                through_block,
                tokens * (6 * 12 * d * d + 6 * length * d),
                tokens,
            )
    for name in ("gpt2", "llama"):
        if name in args.only:
            yield language_model(name, args)


def language_model(name: str, args: argparse.Namespace) -> Case:
    """GPT-2 124M, or a Llama of the shape of Llama 3.2 1B, with random weights; small ones for ``--tiny``."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    length = 16 if args.tiny else 1024 if name == "gpt2" else 2048
    size = 2 if args.tiny else 16 if name == "gpt2" else 4
    vocabulary = 64 if args.tiny else 50304 if name == "gpt2" else 128256
    end = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "vocab_size": vocabulary}

    def build() -> nn.Module:
        if name == "gpt2":
            shape = {"n_embd": 32, "n_layer": 2, "n_head": 2} if args.tiny else {}
            off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            return GPT2LMHeadModel(GPT2Config(n_positions=length, **shape, **off, **end))
        shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        shape |= {"num_key_value_heads": 8}
        if args.tiny:
            shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            shape |= {"num_key_value_heads": 1}
        return LlamaForCausalLM(LlamaConfig(max_position_embeddings=length, tie_word_embeddings=True, **shape, **end))

    with torch.device("meta"):
        weights = sum(m.in_features * m.out_features for m in linear_maps(build()))
    ids = torch.randint(0, vocabulary, (size, length), device=args.device)

    def step(m: nn.Module) -> Tensor:
        return m(input_ids=ids, labels=ids).loss

    title = "GPT-2 124M" if name == "gpt2" else "Llama 1B"
    return Case(f"tiny {name}" if args.tiny else title, build, step, 6.0 * weights * ids.numel(), ids.numel(), True)


# -- all of it


@contextmanager
def quietly() -> Iterator[None]:
    import logging

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.ceiling = measured_peak(args.device, torch.bfloat16, seconds=0.05 if args.tiny else 1.0)
    bandwidth = copy_bandwidth(args.device, args.tiny)
    machine = {key: value for key, value in fingerprint(torch.get_num_threads()).items() if key != "git"}
    found: dict[str, Any] = {
        "machine": machine | {"cuda": torch.version.cuda, "torchao": version("torchao"), "tiny": args.tiny},
        "settings": {"rounds": args.rounds, "tokens": args.tokens, "length": args.length, "sizes": args.sizes},
        "bf16_tflops_ceiling": args.ceiling.flops / 1e12,
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "casts": [],
        "cases": [],
    }
    print(f"ceilings: {found['bf16_tflops_ceiling']:.4g} TFLOP/s bf16, {bandwidth / 1e9:.4g} GB/s copied", flush=True)
    if "casts" in args.only:
        for row in casts(args, bandwidth):
            found["casts"].append(row)
            how = "compiled" if row["compiled"] else "eager"
            print(f"{row['case']:<16} {row['arm']:<20} {how:<9} {row['share_of_copy']:.2f} of a copy", flush=True)
    known = arms(args.tiny)
    with quietly():
        for case in cases(args):
            for compiled in args.compiled:
                for names in pairs(list(known)):
                    row = compare(case, names, known, compiled, args)
                    found["cases"].append(row)
                    print(line(row), flush=True)
    return found


def line(row: dict[str, Any]) -> str:
    s, how = row["speedup"], "compiled" if row["compiled"] else "eager"
    return (
        f"{row['case']:<16} {row['arm']:<20} against {row['baseline']:<20} {how:<9} {row['ms']['median']:9.3f} ms"
        f"  {row['tflops']:7.1f} TFLOP/s  x{s['median']:.3f} ({s['min']:.3f} to {s['max']:.3f})"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="parts to run")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each side; 7, tiny 2")
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="widths d; 1024 to 8192, tiny 32")
    parser.add_argument("--tokens", type=int, default=None, help="of a linear map and a block; 16384, tiny 32")
    parser.add_argument("--length", type=int, default=2048, help="of a block's sequences")
    parser.add_argument("--eager-only", action="store_true", help="compile nothing")
    parser.add_argument("--tiny", action="store_true", help="run in seconds on a CPU")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device: expected one of compute capability 8.9 or later. Add --tiny to see that it runs")
    args.device = torch.device("cpu" if args.tiny else "cuda")
    args.rounds = args.rounds or (2 if args.tiny else 7)
    args.sizes = args.sizes or ([32] if args.tiny else [1024, 2048, 4096, 8192])
    args.tokens = args.tokens or (32 if args.tiny else 16384)
    args.compiled = (False,) if args.tiny or args.eager_only else (False, True)
    found = measure(args)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
