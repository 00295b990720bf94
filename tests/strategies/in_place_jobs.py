"""What the processes of the tests of changes in place run: modules that write to weights or buffers in their forward pass."""

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff
from tests.models import trainer
from tests.strategies.kinds import CLASSES, DIM, KINDS, LENGTH, VOCAB, Mlp

BATCH, BATCHES = 8, 4
#: Techniques by the names that cases give them.
TECHNIQUES: dict[str, Any] = {
    "batch": lambda: lightning_eff.BatchSizeWarmup(1, 0.4, full=2),
    "sam": lambda: lightning_eff.SharpnessAwareMinimization(0.05),
    "noise": lambda: lightning_eff.GradientNoiseScale(),
}


class Range(nn.Module):
    """Keeps the largest hidden value, and the sum of squares, in buffers that no loss depends on."""

    largest: Tensor
    energy: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("energy", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax()))
            self.energy.add_(x.detach().square().sum())
        return x


class Observed(Mlp):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), Range(), nn.Linear(2 * DIM, DIM))


class ClampedHead(Mlp):
    """A table that is read before the blocks, and changed behind them."""

    def extra(self) -> None:
        self.table = nn.Parameter(torch.randn(CLASSES, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens) + self.table.mean()
        for index, block in enumerate(self.blocks):
            x = self.run(block, x, index)
        with torch.no_grad():
            self.table.clamp_(-0.2, 0.2)
        return x @ self.table.t()


MODULES: dict[str, Any] = {
    **{name: KINDS[name].make for name in ("MaxNorm", "Clamped", "Mlp")},
    "Observed": Observed,
    "ClampedHead": ClampedHead,
}


def _loader(ranks: int, rank: int) -> DataLoader[Any]:
    tokens = torch.randint(0, VOCAB, (BATCH * BATCHES, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = [list(range(i * BATCH + rank, (i + 1) * BATCH, ranks)) for i in range(BATCHES)]
    return DataLoader(TensorDataset(tokens, tokens.sum(1) % CLASSES), batch_sampler=batches)


def _strategy(given: dict[str, Any] | str) -> Any:
    if given == "compressed":
        return lightning_eff.CompressedDDPStrategy("bf16")
    return given if isinstance(given, str) else lightning_eff.HybridParallelStrategy(failure_timeout=60.0, **given)


def _run(module: str, technique: str | None, strategy: dict[str, Any] | str) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    net = MODULES[module]()
    alone = strategy == "auto"
    divided = alone or (isinstance(strategy, dict) and any(key.endswith("_parallel_size") for key in strategy))
    ranks, rank = (1, 0) if divided else (2, int(os.environ["RANK"]))
    techniques = [] if technique is None else [TECHNIQUES[technique]()]
    run = trainer(
        *techniques,
        strategy=_strategy(strategy),
        devices=1 if alone else 2,
        max_epochs=1,
        use_distributed_sampler=False,
    )
    run.fit(net, _loader(ranks, rank))
    return {name: value.clone() for name, value in net.state_dict().items()}


def outcomes(cases: dict[str, Any]) -> dict[str, Any]:
    """By case, what each rank was refused with, and else how far its weights and buffers are from one process's."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results: dict[str, Any] = {}
    for name, (module, technique, strategy) in cases.items():
        print(name, flush=True)
        mine: dict[str, Any]
        try:
            found = _run(module, technique, strategy)
            mine = {"refused": ""}
        except ValueError as error:
            found, mine = None, {"refused": str(error)}
        ranks: list[Any] = [None] * 2
        dist.all_gather_object(ranks, (mine, found))
        results[name] = [one for one, _ in ranks]
        if found is not None:
            whole = _run(module, technique, "auto") if technique is None else found
            far = {key: float((found[key] - value).abs().max()) for key, value in whole.items()}
            results[name][0]["apart"] = max(far, key=lambda key: far[key]), max(far.values())
            results[name][0]["ranks"] = max(float((ranks[0][1][k] - ranks[1][1][k]).abs().max()) for k in found)
    return results
