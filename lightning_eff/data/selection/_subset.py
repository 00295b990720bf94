"""Epochs of some of a data set's samples: what techniques that keep a subset share."""

import torch
from torch import Tensor

from lightning_eff._core import rng
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._samples.technique import Choice, Epoch
from lightning_eff._core.session import Session
from lightning_eff.data.selection._offline.files import Told, fingerprint


def of_subset(epoch: Epoch, kept: Tensor, *, who: str) -> Choice | None:
    """Those of the epoch's own order that are in ``kept``, in that order; None where that is all of them.

    Args:
        epoch: whose order the user's sampler gave.
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
            f"{who}: the loader's sampler yields {len(epoch.order):,} samples in epoch {epoch.number}, none of which are among"
            f" the {len(kept):,} kept; expected some. Keep more, or let the sampler go over the whole data set."
        )
    return None if len(order) == len(epoch.order) else Choice(order)


def check_told(session: Session, told: Told, *, who: str) -> None:
    """Compare a file with the data set that is trained on.

    Raises:
        ValueError: on all ranks, if on one of them it is of another data set.
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
    """``count`` of ``size`` indices, each set of them as likely as any other; ascending, long, shape (count,)."""
    return torch.randperm(size, generator=generator)[:count].sort().values
