"""How the cost of optimizers, averages and callbacks grows with parameters, tensors and blocks."""

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

import lightning_eff as eff
from benchmarks.peers.fits import Fit

ROUNDS = 5
SECONDS = 1.0  #: of a point, about
TENSORS = (10, 100, 1_000, 10_000)
SIDES = (32, 128, 512)
BLOCKS = (4, 16, 64)
Step = Callable[[], object]
__all__ = ["Series", "found", "measured"]


@dataclass(frozen=True)
class Series:
    """The cost of one technique at several sizes.

    Args:
        name: of the technique.
        axis: what grows.
        sizes: of the axis.
        build: makes the step at a size, and the step without the technique, whose time is subtracted (None if there is none).
    """

    name: str
    axis: str
    sizes: tuple[int, ...]
    build: Callable[[int], tuple[Step, Step | None]]


def matrices(count: int, side: int) -> list[nn.Parameter]:
    """Square matrices with gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(side, side)) for _ in range(count)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


class Many(LightningModule):
    """Tensors of 8 by 8, all with gradients, at almost no cost of their own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.stack([layer.weight for layer in self.layers]).square().mean() * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(LightningModule):
    """A stack of small blocks."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch.optim.AdamW, for comparison": lambda p: torch.optim.AdamW(p),
    "Muon": lambda p: eff.Muon(p),
    "SOAP": lambda p: eff.SOAP(p),
    "Shampoo": lambda p: eff.Shampoo(p),
    "Adan": lambda p: eff.Adan(p),
    "LAMB": lambda p: eff.LAMB(p),
    "LARS": lambda p: eff.LARS(p),
    "Lion": lambda p: eff.Lion(p),
}
OF_TENSORS: dict[str, Callable[[], Callback]] = {
    "ExponentialMovingAverage": lambda: eff.ExponentialMovingAverage(half_life=100),
    "StochasticWeightAveraging": lambda: eff.StochasticWeightAveraging(start=0.0, cycle=1),
    "LatestWeightAveraging": lambda: eff.LatestWeightAveraging(interval=1),
    "Lookahead": lambda: eff.Lookahead(),
    "ScheduleFree": lambda: eff.ScheduleFree(),
    "GradientNoiseScale": lambda: eff.GradientNoiseScale(),
    "GradientCentralization": lambda: eff.GradientCentralization(),
}
OF_BLOCKS: dict[str, Callable[[], Callback]] = {
    "ExponentialMovingAverage": OF_TENSORS["ExponentialMovingAverage"],
    "GradientNoiseScale": OF_TENSORS["GradientNoiseScale"],
    "LearningRateSchedule": lambda: eff.LearningRateSchedule(),
    "EfficiencyMonitor": lambda: eff.EfficiencyMonitor(),
    "SharpnessAwareMinimization": lambda: eff.SharpnessAwareMinimization(),
    "Rematerialization": lambda: eff.Rematerialization(),
    "ProgressiveLayerDropping": lambda: eff.ProgressiveLayerDropping(),
}


def every() -> list[Series]:
    """All series."""

    def optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], count: int, side: int) -> Step:
        return make(matrices(count, side)).step

    def fits(make: Callable[[], Callback], module: Callable[[], LightningModule], batch: Tensor) -> tuple[Step, Step]:
        return Fit(module(), batch, [make()]), Fit(module(), batch)

    series = [
        Series(name, "tensors of 8 x 8", TENSORS, lambda n, make=make: (optimizer(make, n, 8), None))
        for name, make in OPTIMIZERS.items()
    ]
    series += [
        Series(
            name,
            "tensors of 8 x 8",
            TENSORS,
            lambda n, make=make: fits(make, lambda: Many(n), torch.ones(8)),
        )
        for name, make in OF_TENSORS.items()
    ]
    series += [
        Series(
            name,
            "parameters in four square matrices",
            tuple(4 * side**2 for side in SIDES),
            lambda n, make=make: (optimizer(make, 4, math.isqrt(n // 4)), None),
        )
        for name, make in OPTIMIZERS.items()
    ]
    series += [
        Series(
            name,
            "blocks of width 32",
            BLOCKS,
            lambda n, make=make: fits(make, lambda: Deep(n), torch.randn(8, 32)),
        )
        for name, make in OF_BLOCKS.items()
    ]
    return series


def found(only: Iterable[str] = ()) -> list[Series]:
    """The series whose name or axis has one of the words of ``only`` in it; all of them if there are no words."""
    words = [word.lower() for word in only]
    return [
        one for one in every() if not words or any(word in f"{one.name} growth {one.axis}".lower() for word in words)
    ]


def measured(series: list[Series], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure each series, from small sizes to large ones."""
    for number, one in enumerate(series, 1):
        row: dict[str, Any] = {"name": one.name, "axis": one.axis, "points": [], "exponent": None}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for size in one.sizes:
                    row["points"].append({"size": size, "ms": _cost(*one.build(size))})
                    gc.collect()
            row["exponent"] = exponent([(point["size"], point["ms"]) for point in row["points"]])
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        points = ", ".join(f"{point['size']:,}: {point['ms']:.3f} ms" for point in row["points"])
        tell(f"[growth {number:2} of {len(series)}] {one.name}, {one.axis}: {points} {row.get('error', '')}")
        yield row


def exponent(points: list[tuple[int, float]]) -> float | None:
    """The slope between the two largest sizes in logarithms, or None if a cost is not above 0."""
    (size, cost), (larger, more) = points[-2:]
    return math.log(more / cost) / math.log(larger / size) if min(cost, more) > 0 else None


def _cost(step: Step, without: Step | None) -> float:
    """Milliseconds of a step, less those of the step without the technique: medians of turns."""
    arms = [step] if without is None else [step, without]
    first = [_seconds(arm) for arm in arms for _ in range(2)]  # makes states and caches
    once = sum(first[1::2])
    rounds = max(3, min(ROUNDS, int(SECONDS / max(once, 1e-4))))
    calls = max(1, math.ceil(2e-3 / max(once, 1e-5)))
    taken = [[_seconds(arm, calls) for arm in arms] for _ in range(rounds)]
    middle = [statistics.median(times) for times in zip(*taken, strict=True)]
    return 1e3 * (middle[0] - (middle[1] if without is not None else 0.0))


def _seconds(step: Step, calls: int = 1) -> float:
    began = time.process_time()
    for _ in range(calls):
        step()
    return (time.process_time() - began) / calls
