"""A linear layer and a GPT's block of width 4096 by torch's sparse kernels, against dense products with the same zeros.

A step packs the weights, and is forward and backward from a given gradient of the output, in bfloat16 by autocast.
``difference`` is the largest relative one of the output and the gradients. Masks are given: what choosing 2:4 masks takes
for a weight is in rows of its own, since both sides of a comparison choose them. Blocks are random, and so is the order of
their rows.

On a CPU, with ``tiny``, dense products stand in for the kernels.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from benchmarks.gpu.low_precision import Case, case
from benchmarks.gpu.timing import device, rates, repetitions, seconds, spread
from benchmarks.gpu.work import Row, Skip, Work
from benchmarks.memory.measure import quiet
from lightning_eff.model.sparsity._kernels import blocks, two_of_four
from lightning_eff.model.sparsity._kernels.products import Kernels, SparseProducts
from lightning_eff.model.sparsity._masks.two_of_four import mask_of

ROUNDS = 5
ZEROS = (0.8, 0.9)  #: fractions of blocks that are zero


@contextmanager
def emulated(tiny: bool) -> Iterator[None]:
    """Dense products in place of the kernels, with ``tiny``."""
    if not tiny:
        yield
        return
    nothing, dense = lambda where: None, lambda w, x, bias: F.linear(x, w.to_dense(), bias)
    with (
        mock.patch.multiple(two_of_four, unavailable=nothing, compress=lambda w: w, multiply=dense),
        mock.patch.multiple(blocks, unavailable=nothing, multiply=dense),
    ):
        yield


class Side:
    """A module of its own, with zeros in the weights of its linear layers, that runs steps.

    Args:
        found: what is timed.
        arm: which zeros.
        sides: rows and columns of a block.
        where: the device.
        sparse: whether kernels multiply the weights.
    """

    def __init__(self, found: Case, arm: str, sides: int, where: torch.device, *, sparse: bool) -> None:
        self.found, self.sparse = found, sparse
        self.module, self.precision = copy.deepcopy(found.module), MixedPrecision("bf16-mixed", where.type)  # pyright: ignore[reportArgumentType]
        self.weights = {
            f"{name}.weight": cast(nn.Parameter, m.weight)
            for name, m in self.module.named_modules()
            if isinstance(m, nn.Linear)
        }
        self.products = SparseProducts(self._masked(arm, sides), "sparse", who="sparse")
        if sparse:
            strategy = SimpleNamespace(root_device=where)
            trainer = SimpleNamespace(strategy=strategy, precision_plugin=self.precision)
            self.products.find(cast(Any, SimpleNamespace(trainer=trainer, module=self.module)), self.weights)

    @torch.no_grad()
    def _masked(self, arm: str, sides: int) -> Kernels:
        if arm.startswith("2:4"):
            tiles = arm.endswith("tiles")
            for p in self.weights.values():
                p.mul_(mask_of(p, (0, 1), tiles=tiles))
            return two_of_four.kernels(dict.fromkeys(self.weights, (0, 1)), tiles=tiles)
        places, numbers = dict[str, blocks.Places](), torch.Generator().manual_seed(0)
        for name, p in self.weights.items():
            kept = torch.rand(len(p) // sides, p.shape[1] // sides, generator=numbers) >= float(arm.split()[-1])
            kept[0, 0] = True
            order, mask = torch.randperm(len(p), generator=numbers), torch.zeros(p.shape, dtype=torch.bool)
            mask[order] = kept.repeat_interleave(sides, 0).repeat_interleave(sides, 1)
            places[name] = blocks.places_of(mask.to(p.device), order.to(p.device), (sides, sides))
            p.mul_(mask.to(p.device))
        return blocks.kernels(places.__getitem__, (sides, sides))

    def step(self) -> list[Tensor]:
        """The output and the gradients."""
        if self.sparse:
            for name, p in self.weights.items():
                self.products.masked(name, p)  # as after an optimizer's step, so that they are packed anew
        with self.products.worn(), self.precision.forward_context():
            y = self.module(self.found.x)
        inputs = [self.found.x, *self.module.parameters()]
        return [y.detach(), *torch.autograd.grad(y, inputs, self.found.gradient.to(y.dtype))]


def run(work: Work) -> None:
    """Settings: ``case``, "linear" or "block"; ``block``, the side of a block; those of :func:`.low_precision.case`."""
    where = device(work.tiny)
    torch.manual_seed(0)
    found, arms = case(work.settings, where), ["2:4", "2:4 tiles", *(f"blocks, zeros {zeros}" for zeros in ZEROS)]
    with quiet(), emulated(work.tiny):
        for arm in arms:
            work.row(arm, lambda arm=arm: compare(found, arm, work.settings["block"], where, work.tiny), needs=10)
        if work.settings["case"] == "linear":
            for tiles in (False, True):
                key = f"choosing 2:4{' tiles' if tiles else ''}"
                work.row(key, lambda tiles=tiles: choosing(found, tiles, where, work.tiny), needs=5)


def compare(found: Case, arm: str, sides: int, where: torch.device, tiny: bool) -> Row:
    """The kernels and dense products, in turns A B B A."""
    module = two_of_four if arm.startswith("2:4") else blocks
    if why := module.unavailable(where):
        raise Skip(why)
    both = [Side(found, arm, sides, where, sparse=sparse) for sparse in (False, True)]
    right, got = (side.step() for side in both)
    difference = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, right, strict=True))
    times = max(repetitions(side.step, where, tiny, 0.15) for side in both)
    taken: tuple[list[float], list[float]] = ([], [])
    for round_ in range(2 if tiny else ROUNDS):
        for i in (0, 1) if round_ % 2 == 0 else (1, 0):
            taken[i].append(seconds(both[i].step, where, times))
    return {
        "dense_ms": spread([1e3 * t for t in taken[0]]),
        "ms": spread([1e3 * t for t in taken[1]]),
        "speedup": spread([a / b for a, b in zip(*taken, strict=True)]),
        "weights": len(both[1].products.ran),
        "difference": difference,
    }


def choosing(found: Case, tiles: bool, where: torch.device, tiny: bool) -> Row:
    """Milliseconds for the weight of the linear layer."""
    w = next(found.module.parameters())
    per_second = rates(lambda: mask_of(w, (0, 1), tiles=tiles), 1.0, where, tiny=tiny)
    return {"ms": spread([1e3 / rate for rate in per_second])}
