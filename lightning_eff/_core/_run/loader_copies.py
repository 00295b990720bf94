"""Copies of the training loaders that can be iterated without affecting the running ones."""

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core._run.recording_sampler import users_own
from lightning_eff._core._run.stateful_loaders import has_state, is_torchdata
from lightning_eff._core.loaders import ResumableLoader


def apart(combined: CombinedLoader, epoch: int) -> CombinedLoader:
    """Return loaders over the same data with the same samplers, whose iteration does not affect those of ``combined``.

    Data sets are shared and samplers are copied. The samplers' generators are seeded from the global random state. Worker
    processes are started anew, even if the original's persist.

    Args:
        combined: the run's training loaders.
        epoch: the epoch for samplers with ``set_epoch``.

    Raises:
        ValueError: if a loader, its samplers or its streaming data set cannot be copied.
    """
    again = copy(combined)
    again._iterator = None
    again.flattened = [_apart(loader, epoch) for loader in combined.flattened]
    again.limits = combined.limits
    return again


def _apart(loader: Any, epoch: int) -> Any:
    loader = loader._loader if isinstance(loader, ResumableLoader) else loader
    if isinstance(loader, Sequence):
        return loader
    try:
        if not isinstance(loader, DataLoader):
            return deepcopy(loader)
        again = copy(loader)
        moves = isinstance(loader.dataset, IterableDataset) or has_state(loader.dataset)
        memo: dict[int, Any] = {} if moves and loader.num_workers == 0 else {id(loader.dataset): loader.dataset}
        for name in ("dataset", "sampler", "batch_sampler"):
            found = getattr(loader, name)
            again.__dict__[name] = deepcopy(users_own(found), memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"The training loader ({type(loader).__name__}) cannot be copied ({error}), so its data cannot be read"
            " during the running epoch. Use a DataLoader over a data set that can be copied."
        ) from error
    again.__dict__.update(_iterator=None, persistent_workers=False)
    again.__dict__.pop("_get_iterator", None)
    if is_torchdata(again):
        again.__dict__["_initial_iter_for_state_dict"] = False
        again.__dict__["next_iter_state"] = None
    owners: list[Any] = [again, again.sampler, again.batch_sampler, getattr(again.batch_sampler, "sampler", None)]
    for owner in owners:
        if isinstance(getattr(owner, "generator", None), torch.Generator):
            seed = int(torch.empty((), dtype=torch.int64).random_())
            owner.__dict__["generator"] = torch.Generator().manual_seed(seed)
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
    return again
