"""Compute each sample's loss under a model that learned from other samples, by training that model within the run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core._samples.by_index import at_hand, batches_by_index, chain_of, losses_of, put_together
from lightning_eff._core._samples.chosen import share
from lightning_eff._core._samples.scoring import Scorer
from lightning_eff._core.losses import loss_of
from lightning_eff._core.session import Session
from lightning_eff._core.steps import silent


def irreducible_losses(
    session: Session, scorer: Scorer, model: nn.Module | None, *, size: int, epochs: int, lr: float
) -> Tensor:
    """Compute each sample's loss under a model trained on the half of the data without it, shape (N,), float64.

    The halves come from one random order of the indices. The model starts from its current weights for each half. Afterwards it
    has its weights, buffers, metrics and modes back. Gradients are averaged over the ranks, each of which trains on its own
    part. Logs and the global random state stay as they were. The cost is counted.

    Args:
        session: the run, within its first step.
        scorer: splits losses by sample.
        model: a LightningModule whose ``training_step`` takes the same batches. None takes the run's own module.
        size: the batch size on each rank.
        epochs: the number of passes over each half.
        lr: the initial learning rate of AdamW, which decays to 0 linearly.

    Raises:
        ValueError: on all ranks, if a loss cannot be split by sample, or is NaN or infinite.
    """
    loader = session.loaders.latest
    assert loader is not None
    number, world_size = len(loader.dataset), session.replicas.count
    order = torch.randperm(number, generator=session.generator("RHOLoss", "halves"))
    halves, found = (order[: number // 2], order[number // 2 :]), torch.full((number,), torch.nan, dtype=torch.float64)
    _, module, _ = chain_of(session, model)
    for which, (learnt, scored) in enumerate((halves, halves[::-1])):
        own = share(scored, session.rank, world_size, drop_last=False).tolist()
        with at_hand(session, module), _as_before(module), rng.keyed(session.seed, "RHOLoss", "half", which):
            _train(session, model, learnt, which, size=size, epochs=epochs, lr=lr)
            problem, values = losses_of(session, scorer, own, size, model)
        some = put_together(session, own, problem, torch.tensor(values, dtype=torch.float64))
        found[scored] = some[scored]
    return found


def _train(
    session: Session, model: nn.Module | None, indices: Tensor, which: int, *, size: int, epochs: int, lr: float
) -> None:
    """Train the model on these samples with AdamW, independent of the run's own optimizer."""
    chain, module, with_index = chain_of(session, model)
    step = chain.original if model is not None else session.chain.original
    weights = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr)
    world_size, cost = session.replicas.count, session.chain.cost
    each = len(share(indices, 0, world_size, drop_last=False))
    each -= each > 1 and each % size == 1  # a last batch of one sample has no batch statistics
    per_epoch = -(-each // size)
    done, began = 0, time.perf_counter()
    for epoch in range(epochs):
        mixed = indices[torch.randperm(len(indices), generator=session.generator("RHOLoss", "order", which, epoch))]
        own = share(mixed, session.rank, world_size, drop_last=False)[:each].tolist()
        for number, batch in enumerate(batches_by_index(session, own, size)):
            loss = loss_of(step(batch, *((number,) if with_index else ())))
            gradients = _gradients(session, loss, weights)
            for p, g in zip(weights, gradients, strict=True):
                p.grad = g
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - done / (per_epoch * epochs))
            optimizer.step()
            torch.clear_autocast_cache()
            done += 1
            cost.add(batch, backward=1)
    cost.seconds += time.perf_counter() - began


def _gradients(session: Session, loss: Tensor | None, weights: list[nn.Parameter]) -> list[Tensor]:
    """Compute gradients averaged over the ranks, 0 where ``loss`` has none, without hooks of DDP or of techniques."""
    found: tuple[Tensor | None, ...] = (None,) * len(weights)
    if loss is not None:
        device = loss.device.type
        plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
        with plain:
            found = torch.autograd.grad(loss, weights, allow_unused=True)
    gradients = [
        torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for p, g in zip(weights, found, strict=True)
    ]
    if session.replicas.count > 1:
        gradients = [session.trainer.strategy.reduce(g.contiguous(), reduce_op="mean") for g in gradients]
    return gradients


@contextmanager
def _as_before(module: Any) -> Iterator[None]:
    """Restore the module's weights, gradients, buffers, metrics and attributes afterwards, and mute its logs."""
    kept = [(p, p.detach().clone(), p.grad) for p in module.parameters()]
    try:
        with silent(module), torch.enable_grad():
            for p, _, _ in kept:
                p.grad = None
            yield
    finally:
        with torch.no_grad():
            for p, value, gradient in kept:
                p.copy_(value)
                p.grad = gradient
        torch.clear_autocast_cache()
