"""A linear map and a GPT's block of width 4096 in low precision, against bfloat16, eager or compiled.

A step is forward and backward from a given gradient of the output, with no loss. (The committed figures of an H100 are older:
their steps had a mean square for a loss, about a quarter of the time of bfloat16's linear map.) Each arm takes turns with
bfloat16 on a module of its own with the same weights; a ratio is taken within each round. bfloat16 against itself shows the
noise. Whole GPT-2, with its optimizer, is ``gpt2``'s.

TFLOP/s count the products: 6 M K N of a linear map on M tokens, and attention's causal half.
"""

import copy
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from benchmarks.gpu.timing import device, repetitions, seconds, spread
from benchmarks.gpu.work import Row, Skip, Work
from benchmarks.memory.measure import quiet
from lightning_eff import FP8Precision, INT8Precision, StochasticRoundingBF16
from lightning_eff.precision._scaling.history import AmaxHistory

ROUNDS = 5


class Case(NamedTuple):
    """What is timed.

    Attributes:
        module: with weights in float32, on the device.
        x: the input, whose gradient is computed.
        gradient: of the output.
        flops: of a step's products.
        tokens: of a step.
    """

    module: nn.Module
    x: Tensor
    gradient: Tensor
    flops: float
    tokens: int


def plugins(*, tiny: bool, skip: tuple[str, ...] = ()) -> dict[str, Callable[[], Precision]]:
    """What makes the precision plugin of each arm; on a CPU, with ``tiny``, float8 is emulated.

    Args:
        tiny: see above.
        skip: FP8Precision's and INT8Precision's.
    """

    def fp8(
        scaling: Any, backend: str = "emulated" if tiny else "scaled_mm", **settings: Any
    ) -> Callable[[], Precision]:
        return lambda: FP8Precision(scaling, skip=skip, backend=backend, **settings)  # pyright: ignore[reportArgumentType]

    def ao(scaling: Any) -> Callable[[], Precision]:
        def make() -> Precision:
            if importlib.util.find_spec("torchao") is None:
                raise Skip("torchao is not installed")
            if tiny and scaling == "rowwise" and not scaled_by_rows():
                raise Skip(f"on a CPU torch {torch.__version__} multiplies float8 with one scale for a tensor only")
            return FP8Precision(scaling, skip=skip, backend="torchao")

        return make

    return {
        "bf16": lambda: MixedPrecision("bf16-mixed", "cpu" if tiny else "cuda"),
        "tensorwise": fp8("tensorwise"),
        "rowwise": fp8("rowwise"),
        "blockwise": fp8("blockwise"),
        "int8": lambda: INT8Precision(skip=skip),
        "stochastic rounding": StochasticRoundingBF16,
        "tensorwise delayed": fp8("tensorwise", amax="delayed"),
        "tensorwise fastest": fp8("tensorwise", accumulate="fastest"),
        "torchao tensorwise": ao("tensorwise"),
        "torchao rowwise": ao("rowwise"),
    }


def scaled_by_rows() -> bool:
    """Whether torch's own product of float8 matrices takes a scale for each row on a CPU, as it does from 2.12 on."""
    x, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.T, scale, scale.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def run(work: Work) -> None:
    """Settings: ``case``, "linear" or "block"; ``compiled``; ``arms``; ``width``, ``tokens`` and ``length`` of sequences."""
    where, compiled = device(work.tiny), work.settings["compiled"]
    torch.manual_seed(0)
    found = case(work.settings, where)
    with quiet(), torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        known = plugins(tiny=work.tiny)
        baseline = Side(found, known["bf16"](), compiled)
        baseline.warm_up(work.tiny)
        for name in work.settings["arms"]:
            work.row(
                name,
                lambda name=name: compare(found, baseline, known[name](), compiled, where, work.tiny),
                needs=15 if compiled else 5,
            )


def case(settings: dict[str, Any], where: torch.device) -> Case:
    """The linear map or the block."""
    width, tokens, length = settings["width"], settings["tokens"], settings["length"]
    if settings["case"] == "linear":
        shape, flops = (tokens, width), 6.0 * tokens * width**2
    else:
        shape, flops = (tokens // length, length, width), tokens * (6.0 * 12 * width**2 + 6.0 * length * width)
    x = torch.randn(*shape, device=where, dtype=torch.bfloat16)
    with where:
        if settings["case"] == "linear":
            module = nn.Sequential(nn.Linear(width, width, bias=False))
        else:
            from examples.gpt.module import Block

            module = nn.Sequential(Block(width, max(1, width // 128), length, 0.0))

    gradient = torch.randn(*shape, device=where, dtype=torch.bfloat16) / x.numel()
    return Case(module, x.requires_grad_(), gradient, flops, tokens)


class _Backward:
    """All that a plugin needs of a LightningModule to run a backward pass."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def backward(self, y: Tensor) -> None:
        y.backward(self.gradient.to(y.dtype))


class Side:
    """A module of its own that runs steps under a precision plugin."""

    def __init__(self, case: Case, precision: Precision, compiled: bool) -> None:
        self.case, self.precision, self.backward = case, precision, _Backward(case.gradient)
        self.module = copy.deepcopy(case.module)
        precision.convert_module(self.module)
        backend = "inductor" if next(self.module.parameters()).is_cuda else "aot_eager"
        self.run = torch.compile(self.module, backend=backend) if compiled else self.module

    def step(self) -> None:
        with self.precision.forward_context():
            y = self.run(self.case.x)
        self.precision.backward(y, self.backward, None)  # pyright: ignore[reportArgumentType]
        for t in (self.case.x, *self.module.parameters()):
            t.grad = None
        history = getattr(self.precision, "_history", None)
        if isinstance(history, AmaxHistory):
            history.advance()

    def warm_up(self, tiny: bool) -> None:
        for _ in range(1 if tiny else 3):
            self.step()


def compare(case: Case, baseline: Side, precision: Precision, compiled: bool, where: torch.device, tiny: bool) -> Row:
    """The arm and bfloat16, in turns A B B A."""
    side = Side(case, precision, compiled)
    try:
        side.warm_up(tiny)
        times = max(repetitions(of.step, where, tiny, 0.15) for of in (baseline, side))
        found: tuple[list[float], list[float]] = ([], [])
        for round_ in range(2 if tiny else ROUNDS):
            for i in (0, 1) if round_ % 2 == 0 else (1, 0):
                found[i].append(seconds((baseline, side)[i].step, where, times))
    finally:
        side.precision.teardown()
    median = statistics.median(found[1])
    return {
        "bf16_ms": spread([1e3 * t for t in found[0]]),
        "ms": spread([1e3 * t for t in found[1]]),
        "speedup": spread([a / b for a, b in zip(*found, strict=True)]),
        "tflops": case.flops / median / 1e12,
        "tokens_per_second": case.tokens / median,
        "repetitions": times,
    }
