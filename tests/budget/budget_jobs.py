"""What two processes run of budget techniques: ``python -m tests.budget.budget_jobs DIRECTORY``."""

import copy
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_eff import AdaScale, BatchSizeWarmup, GradientNoiseScale, LinearScaling
from tests import processes
from tests.models import TinyClassifier, flat, loader, trainer
from tests.runs import SaveBatches, differences, final_state, fit

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 80, "max_steps": 7}


def without_dropout(lr: float = 0.1, batch_norm: bool = False) -> TinyClassifier:
    """A classifier whose gradient of a batch does not depend on how the batch is cut."""
    pl.seed_everything(3, verbose=False)
    net = TinyClassifier(lr=lr, batch_norm=batch_norm)
    net.head[0].p = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    return net


class Known(pl.LightningModule):
    """The loss of a sample ``x`` is ``w x``: its gradient is the sample, whatever the weights."""

    mean = torch.tensor([0.5, -1.0, 0.0, 0.25])
    std = torch.tensor([1.0, 0.5, 2.0, 0.1])

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0] * self.w).sum(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def known_samples(count: int) -> torch.Tensor:
    """Normal samples, (count, 4), the first ones the same whatever the count."""
    noise = torch.cat([torch.randn(1, 4, generator=torch.Generator().manual_seed(i)) for i in range(min(count, 4000))])
    noise = torch.randn(count, 4, generator=torch.Generator().manual_seed(0)) if count > 4000 else noise
    return Known.mean + Known.std * noise


def noise(root: Path) -> dict[str, Any]:
    """What is measured of two ranks' gradients, with one micro-batch each and with four."""
    found = {}
    for window in (1, 4):
        technique = GradientNoiseScale(half_life=1e9)
        t = trainer(technique, strategy="ddp", devices=2, max_steps=40 // window, accumulate_grad_batches=window)
        data = TensorDataset(known_samples(320))
        sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
        t.fit(Known(), DataLoader(data, 4, sampler=sampler))
        found[f"{window}"] = _agreed({name: float(value) for name, value in technique.report().items()})
    steps, rank = known_samples(80).split(10), int(os.environ["RANK"])
    own: Any = [[part] for step in steps for part in step.split([1, 3, 4, 2])[2 * rank : 2 * rank + 2]]
    technique = GradientNoiseScale(half_life=1e9)
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    t = trainer(technique, max_steps=8, accumulate_grad_batches=2, **settings)
    t.fit(Known(), DataLoader(own, batch_size=None))
    found["unequal"] = _agreed({name: float(value) for name, value in technique.report().items()})
    return found


def _alike(vector: torch.Tensor) -> bool:
    others = [torch.empty_like(vector) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, vector)
    return all(torch.equal(vector, other) for other in others)


def _agreed(own: Any) -> list[Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    return every


def batch(root: Path) -> dict[str, Any]:
    """Train with batches that grow, and go on within a window; ends of both ways beside each other."""
    found: dict[str, Any] = {}
    ends = []
    for by in ("accumulation", "batch"):

        def build(by: Any = by) -> list[Any]:
            return [BatchSizeWarmup(1, 0.4, full=3, by=by)]

        net, t = fit("llama", build, callbacks=[SaveBatches(root / by, [8])], **DDP)
        whole = final_state(net, t)
        again = final_state(*fit("llama", build, resume=root / by / "batch=8.ckpt", **DDP))
        still = without_dropout()
        data = loader("classifier", 240, shuffle=False)
        trainer(*build(), strategy="ddp", devices=2, max_steps=7).fit(still, data)
        ends.append(flat(still))
        window = torch.load(root / by / "batch=8.ckpt", weights_only=True)["lightning_eff"]["window"]
        found[by] = {"alike": _alike(flat(net)), "differences": _agreed(differences(whole, again)), "window": window}
    found["close"] = float((ends[0] - ends[1]).abs().max())
    return found


Windows = list[list[tuple[Tensor, ...]]]  # of each step, the samples of its micro-batches


class Bent(pl.LightningModule):
    """A small network in float64, with momentum and a learning rate that falls with every step of the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(2, verbose=False)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0].double()), batch[1].double())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def pairs(count: int) -> tuple[Tensor, Tensor]:
    """Samples and noisy targets of a regression."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=g, dtype=torch.float64)
    return x, x[:, :1].sin() + 0.5 * torch.randn(count, 1, generator=g, dtype=torch.float64)


def ada_scale_by_hand(
    steps: Windows, power: float = 1.0, rate: Callable[[float], float] = lambda tau: 0.05 / (1 + 0.3 * math.floor(tau))
) -> tuple[Tensor, float, list[float]]:
    """Johnson et al.'s loop on :class:`Bent`: its weights, the steps of the small batch, and the gain of each step."""
    net = copy.deepcopy(Bent().net)
    speed = [torch.zeros_like(p) for p in net.parameters()]
    tau, gains = 0.0, list[float]()
    past: list[tuple[float, float]] = []
    for parts in steps:
        S = len(parts)
        assert len(past) < 1000 / S, "the averages are means so far"
        r = 1.0
        if past:
            sigma2, mu2 = (sum(column) / len(past) for column in zip(*past, strict=True))
            r = (sigma2 + mu2) / (sigma2 / S + mu2)
        each = []
        for x, y in parts:
            loss = ((net(x) - y) ** 2).mean()
            each.append(torch.autograd.grad(loss, list(net.parameters())))
        mean = [sum(g[i] for g in each) / S for i in range(len(speed))]
        square = sum(float((g * g).sum()) for g in mean)
        sigma2 = (sum(float((g * g).sum()) for own in each for g in own) - S * square) / (S - 1)
        past.append((max(sigma2, 1e-6), max(square - sigma2 / S, 0.0)))
        with torch.no_grad():
            for p, v, g in zip(net.parameters(), speed, mean, strict=True):
                v.mul_(0.9).add_(g)
                p.sub_(r**power * rate(tau) * v)
        tau += r
        gains.append(r)
    return flat(net), tau, gains


def scaled(root: Path) -> dict[str, Any]:
    """AdaScale on two ranks, with one micro-batch each and with two; and resumed within a window."""
    found: dict[str, Any] = {}

    def run(window: int, *callbacks: Any, resume: Any = None) -> tuple[pl.LightningModule, pl.Trainer, AdaScale]:
        technique, net = AdaScale(), Bent()
        settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
        settings |= {"precision": "64-true", "accumulate_grad_batches": window}
        t = trainer(technique, *callbacks, max_steps=12 // window, **settings)
        data = TensorDataset(*pairs(96))
        sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
        t.fit(net, DataLoader(data, 4, sampler=sampler), ckpt_path=resume)
        return net, t, technique

    for window in (1, 2):
        net, t, technique = run(window, SaveBatches(root / "scaled", [5] if window == 2 else []))
        found[f"{window}"] = _agreed({**technique.report(), "weights": flat(net).tolist()})
    whole = final_state(net, t)
    again = final_state(*run(2, resume=root / "scaled" / "batch=5.ckpt")[:2])
    return {**found, "differences": _agreed(differences(whole, again))}


def linear(root: Path) -> dict[str, Any]:
    """Ranks whose loaders make batches of 2 and of 4, in windows of 3: what batch and rate each finds."""
    rank = int(os.environ["RANK"])
    technique, net = LinearScaling(6, 0.5), without_dropout()
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    t = trainer(technique, max_steps=4, accumulate_grad_batches=3, **settings)
    t.fit(net, loader("classifier", 96, 2 + 2 * rank))
    found = {"reports": _agreed(technique.report()), "alike": _alike(flat(net))}
    data = loader("classifier", 96)
    if rank == 0:  # batches of any sizes, which a list of indices is not asked for
        data = DataLoader(data.dataset, batch_sampler=[[i, i + 1] for i in range(0, 48, 2)])
    try:
        trainer(LinearScaling(6), max_steps=2, **settings).fit(without_dropout(), data)
    except ValueError as error:
        found["refused"] = _agreed(str(error))
    return found


def two_processes(once: Callable[[str, Callable[[], Any]], Any]) -> dict[str, Any]:
    """What each job found, by its name: one start of processes serves all tests of budget techniques."""
    return once("budget", lambda: processes.launch("tests.budget.budget_jobs", forked=True))


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    result = {job.__name__: job(root) for job in (batch, noise, scaled, linear)}
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
