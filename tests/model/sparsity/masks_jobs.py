"""What two processes run of masks, and one process alone on all their samples."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff import SNIP, GraSP, LotteryTickets, RigL
from lightning_eff.model.sparsity._masks.masked import Masked
from tests.model.sparsity.gan import GAN, Zeros, batches
from tests.model.sparsity.sparse import Counts, flat_mask
from tests.models import TinyGPT, make_batch, trainer

TECHNIQUES: dict[str, Any] = {
    "SNIP": lambda: SNIP(sparsity=0.5),
    "GraSP": lambda: GraSP(sparsity=0.5, temperature=1.0),
    "RigL": lambda: RigL(sparsity=0.5, interval=1, until=1.0),
    "LotteryTickets": lambda: LotteryTickets(rounds=1),
}


def half(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Every other sample."""
    return {name: value[rank::2] for name, value in batch.items()}


def run(technique: Masked, rank: int | None, steps: int) -> Counts:
    """Train a GPT of double precision with plain steps on the same 8 samples, or on one rank's half of them."""
    torch.manual_seed(0)
    net, counts = TinyGPT(2, dropout=0.0).double(), Counts()
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.1)
    batch = make_batch("tiny_gpt", 8)
    data: DataLoader[Any] = DataLoader([batch if rank is None else half(batch, rank)] * steps, batch_size=None)  # pyright: ignore[reportArgumentType]
    ddp: dict[str, Any] = {} if rank is None else {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    pl.seed_everything(3, verbose=False)
    trainer(technique, counts, max_steps=steps, **ddp).fit(net, data)
    return counts


def together(steps: int) -> dict[str, Any]:
    """Of each technique, on both ranks: what leaked, and the masks after each step."""
    found: dict[str, Any] = {}
    for name, build in TECHNIQUES.items():
        counts = run(build(), int(os.environ["RANK"]), steps)
        own = {"leaks": counts.leaks, "masks": [flat_mask(one).int().tolist() for one in counts.masks]}
        ranks: list[Any] = [None, None]
        torch.distributed.all_gather_object(ranks, own)
        found[name] = ranks
    return found


def gans() -> dict[str, Any]:
    """Of each technique on a GAN, on both ranks: what leaked, the masks at the end, and the weights."""
    found: dict[str, Any] = {}
    for name, build in {**TECHNIQUES, "RigL": lambda: RigL(sparsity=0.5, interval=2, until=1.0)}.items():
        pl.seed_everything(3, verbose=False)
        net, technique = GAN(shared=False), build()
        data: DataLoader[Any] = DataLoader(batches(8)[int(os.environ["RANK"]) :: 2], batch_size=None)  # pyright: ignore[reportArgumentType]
        ddp: dict[str, Any] = {"strategy": "ddp_find_unused_parameters_true", "devices": 2}
        zeros = Zeros(technique)
        trainer(technique, zeros, max_epochs=1, use_distributed_sampler=False, **ddp).fit(net, data)
        weights = {n: p.detach().flatten().tolist() for n, p in net.named_parameters()}
        own = {"leaks": zeros.leaks, "masks": flat_mask(technique.masks).int().tolist(), "weights": weights}
        ranks: list[Any] = [None, None]
        torch.distributed.all_gather_object(ranks, own)
        found[name] = ranks
    return found
