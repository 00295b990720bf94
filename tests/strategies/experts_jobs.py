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

import lightning_eff as eff
from lightning_eff import ExactResume, Rematerialization, SparseUpcycling
from lightning_eff.model.layers._experts.module import Seen, dispatches
from lightning_eff.strategies._hybrid.shards import whole_of
from tests.mixtures import built
from tests.models import Samples, module, trainer
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
        name = "llama" if kind == "mixtral" else kind.removeprefix("upcycled ") if "upcycled" in kind else "tiny_gpt"
        self.samples = Samples(name, SIZE * STEPS)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(self.samples, shuffle=False, **kwargs)
        return DataLoader(self.samples, SIZE // kwargs["num_replicas"], sampler=sampler)


UPCYCLED = {"experts": 4, "balance": 0.1}


def net_of(kind: str, **kwargs: Any) -> Any:
    if kind.startswith("upcycled "):
        pl.seed_everything(1, verbose=False)
        net: Any = module(kind.removeprefix("upcycled ")).double()
        eff.apply(net, SparseUpcycling(**UPCYCLED))
        with torch.no_grad():  # experts that differ, and routers with preferences
            for name, p in net.named_parameters():
                if "expert_weight" in name or "router" in name:
                    p.add_(torch.randn_like(p) * p.std() * (20 if "router" in name else 0.3))
    else:
        net = built(kind, **kwargs)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.1)
    return net


def loop(kind: str, parts: Sequence[Sequence[int]]) -> tuple[list[float], dict[str, Tensor]]:
    """The mean losses over the parts of each batch, and the weights that plain SGD makes of their gradients."""
    net, batches = net_of(kind), Data(kind).samples.batch
    net.log = lambda *args, **kwargs: None
    optimizer, losses = net.configure_optimizers(), []
    routers = dispatches(net).values()
    for step in range(STEPS):
        total = 0.0
        for part in parts:
            rows = [SIZE * step + i for i in part]
            seen: list[Seen] = []
            for router in routers:
                router.seen = seen
            loss = net.training_step({key: value[rows] for key, value in batches.items()}, 0)
            balance = sum(one.balance for one in seen if one.balance is not None) if seen else 0.0
            loss = (loss + UPCYCLED["balance"] * torch.as_tensor(balance).to(loss.dtype)) / len(parts)
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
    more: list[pl.Callback] = [Rematerialization(policy="sqrt")] if case.get("remat") else []
    more += [SparseUpcycling(**UPCYCLED)] if case["kind"].startswith("upcycled") else []
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


def late(layout: Settings) -> list[dict[str, Any]]:
    """Blocks begin to leave balance losses in the second step, as each of these ways does."""
    found: dict[str, Any] = {}
    for kind in ("attribute", "list", "pair of logits"):
        case = {"kind": kind, "strategy": layout, "module": {"since": 1}}
        try:
            found[kind] = fit(case)[0]
        except ValueError as error:
            found[kind] = str(error)
    return everywhere(found)


def late_in_a_stage(kind: str) -> list[float]:
    """The same in a pipeline, where the first stage raises alone."""
    return fit(
        {"kind": kind, "strategy": {"pipeline_parallel_size": 2, "num_microbatches": 4}, "module": {"since": 1}}
    )[0]


def states(directory: str) -> dict[str, Any]:
    """How far weights are apart after steps that go on with the optimizer states of a dense run, from those under DDP."""

    def trained(strategy: Any, *callbacks: pl.Callback) -> dict[str, Tensor]:
        pl.seed_everything(1, verbose=False)
        net: Any = module("vit").double()
        net.configure_optimizers = lambda: torch.optim.AdamW(net.parameters(), lr=1e-3)
        saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
        kind = {"devices": 2, "max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": saves}
        t = trainer(*callbacks, strategy=strategy, use_distributed_sampler=False, **kind)
        t.fit(net, datamodule=Data("upcycled vit"))
        return {name: whole_of(p).detach().clone() for name, p in net.named_parameters()}

    trained("ddp", ModelCheckpoint(directory, filename="dense"))
    path = str(Path(directory, "dense.ckpt"))
    wanted = trained("ddp", SparseUpcycling(4, states=path))
    found = {"without": _apart(trained("ddp", SparseUpcycling(4)), wanted)}
    found["shards"] = _apart(trained(strategy_of({}, failure_timeout=None), SparseUpcycling(4, states=path)), wanted)
    return {name: everywhere(apart) for name, apart in found.items()}
