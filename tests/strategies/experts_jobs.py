"""What the processes of the tests of mixtures of experts run: whole runs of the Trainer, and a loop that they must equal."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_eff import ExactResume, Rematerialization
from lightning_eff.strategies._hybrid.shards import whole_of
from tests.mixtures import built
from tests.models import Samples, trainer
from tests.strategies.hybrid_jobs import Recorder, Settings, averaged, everywhere, strategy_of

SIZE, STEPS = 8, 3
#: The samples of a batch by the process, or the micro-batch, whose balance loss counts them together.
PARTS: dict[str, list[list[int]]] = {
    "whole": [[*range(SIZE)]],
    "replicas": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "micro-batches": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "micro-batches of replicas": [[0, 2], [4, 6], [1, 3], [5, 7]],
}


class Data(pl.LightningDataModule):
    """The same batches in the same order in every layout: each replica takes its samples of each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.samples = Samples("llama" if kind == "mixtral" else "tiny_gpt", SIZE * STEPS)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(self.samples, shuffle=False, **kwargs)
        return DataLoader(self.samples, SIZE // kwargs["num_replicas"], sampler=sampler)


def net_of(kind: str, **kwargs: Any) -> Any:
    net: Any = built(kind, **kwargs)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.1)
    return net


def loop(kind: str, parts: Sequence[Sequence[int]]) -> tuple[list[float], dict[str, Tensor]]:
    """The mean losses over the parts of each batch, and the weights that plain SGD makes of their gradients."""
    net, batches = net_of(kind), Data(kind).samples.batch
    net.log = lambda *args, **kwargs: None
    optimizer, losses = net.configure_optimizers(), []
    for step in range(STEPS):
        total = 0.0
        for part in parts:
            rows = [SIZE * step + i for i in part]
            loss = net.training_step({key: value[rows] for key, value in batches.items()}, 0) / len(parts)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach() for name, p in net.named_parameters()}


def fit(case: Settings, *callbacks: pl.Callback, resume: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of a run as ``case`` says: "kind", "module", "strategy", "remat"."""
    net, recorder = net_of(case["kind"], **case.get("module", {})), Recorder()
    strategy = (
        case["strategy"] if isinstance(case["strategy"], str) else strategy_of(case["strategy"], failure_timeout=None)
    )
    more = [Rematerialization(policy="sqrt")] if case.get("remat") else []
    t = trainer(
        ExactResume(),
        recorder,
        *more,
        *callbacks,
        strategy=strategy,
        devices=dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        max_epochs=-1,
        use_distributed_sampler=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
    )
    t.fit(net, datamodule=Data(case["kind"]), ckpt_path=resume)
    return averaged(recorder.losses), {name: whole_of(p).detach().clone() for name, p in net.named_parameters()}


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def everything(directory: str, cases: dict[str, Settings], resumed: dict[str, Settings]) -> dict[str, Any]:
    """How far each case's run is from its loop, on each rank, or the message of its refusal; and resumed runs."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            losses, weights = fit(case)
            wanted, by_hand = loop(case["kind"], PARTS[case["parts"]])
            apart = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
            mine: Any = {"loss": apart, "weights": _apart(weights, by_hand), "learnt": abs(wanted[-1] - wanted[0])}
        except ValueError as error:
            mine = str(error)
        found[name] = everywhere(mine)
    for name, case in resumed.items():
        folder = Path(directory, name)
        save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        losses, weights = fit(case, save)
        again, same = fit(case, resume=str(folder / "step=2.ckpt"))
        found[f"{name}, resumed"] = everywhere([again == losses[2:], _apart(weights, same) == 0.0])
    return found
