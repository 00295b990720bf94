"""Epochs over a part of the data set, for techniques that keep a subset."""

import torch
from torch import Tensor

from lightning_eff._core import rng
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._samples.technique import Choice, Epoch
from lightning_eff._core.session import Session
from lightning_eff.data.selection._offline.files import Told, fingerprint


def of_subset(epoch: Epoch, kept: Tensor, *, who: str) -> Choice | None:
    """Choose the samples of the epoch's own order that are in ``kept``, or None if all of them are.

    Args:
        epoch: the epoch, with the order of the user's sampler.
        kept: indices of the data set, shape (m,), long.
        who: the technique's name.

    Raises:
        ValueError: if the user's sampler yields none of them.
    """
    inside = torch.zeros(epoch.size, dtype=torch.bool)
    inside[kept] = True
    order = epoch.order[inside[epoch.order]]
    if not len(order):
        raise ValueError(
            f"{who}: the loader's sampler yields {len(epoch.order):,} samples in epoch {epoch.number}, but none of the"
            f" {len(kept):,} samples to train on. Keep more samples, or use a sampler over the whole data set."
        )
    return None if len(order) == len(epoch.order) else Choice(order)


def check_told(session: Session, told: Told, *, who: str) -> None:
    """Check that a file belongs to the training data set.

    Raises:
        ValueError: on all ranks, if it belongs to another data set on one of them.
    """
    loader = session.loaders.latest
    assert loader is not None
    found = None
    if told.fingerprint:
        with rng.keyed(0, who, "fingerprint"):
            found = fingerprint(loader.dataset)
    text = told.problem(len(loader.dataset), found)
    agree(session, None if text is None else ValueError(f"{who}: {text}"))


def random_subset(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` of ``size`` indices uniformly without replacement, in ascending order, long, shape (count,)."""
    return torch.randperm(size, generator=generator)[:count].sort().values
