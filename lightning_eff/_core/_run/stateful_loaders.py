"""Loaders with their own state: torchdata's ``StatefulDataLoader``, litdata's ``StreamingDataLoader``, and custom ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core import rng


def has_state(value: Any) -> bool:
    """Return whether ``value`` can save and restore its position.

    Some loaders have both methods but no state behind them, such as accelerate's around a plain ``DataLoader``.
    """
    if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
        return False
    if not isinstance(value, DataLoader) or is_torchdata(value):
        return True
    try:
        with rng.fork():
            value.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
    except AttributeError:
        return False
    except Exception:
        return True
    return True


def is_torchdata(loader: Any) -> bool:
    """Return whether ``loader`` keeps its state as torchdata's ``StatefulDataLoader`` does."""
    return getattr(getattr(type(loader), "state_dict", None), "__module__", "").startswith("torchdata.")


def keeps_state(loader: Any) -> bool:
    """Return whether ``loader`` must be resumed from its own state.

    This is not so for torchdata's loader over a map-style data set without state. There, samplers and workers begin an epoch
    from the random state alone, as with a plain ``DataLoader``. Repeating the epoch also repeats random augmentation in
    workers, which the loader's own state omits.
    """
    if not has_state(loader):
        return False
    if not is_torchdata(loader):
        return True
    return isinstance(loader.dataset, IterableDataset) or has_state(loader.dataset)


def own_state(loader: Any) -> dict[str, Any] | None:
    """Return the loader's own state; None if no iteration has begun, because reading it might begin one."""
    if is_torchdata(loader) and loader._iterator is None:
        return None
    with rng.fork():
        return loader.state_dict()


@contextmanager
def generator_in_state(loader: Any, state: dict[str, Any]) -> Iterator[None]:
    """Make ``loader`` draw its workers' seed from ``state`` when an iteration begins, without changing the global state."""
    if not isinstance(loader, DataLoader) or loader.generator is not None:
        yield
        return
    loader.generator = torch.Generator()
    loader.generator.set_state(state["torch"])
    try:
        yield
    finally:
        loader.generator = None


def finish_epoch(loader: Any, state: dict[str, Any]) -> None:
    """Bring ``loader`` to the end of the epoch that ended with ``state``, so that its next iteration begins another."""
    if not is_torchdata(loader):
        loader.load_state_dict(state)
    elif loader.num_workers == 0:
        loader.load_state_dict(state)
        with rng.fork():
            loader._get_iterator()  # restores the data set's state; the next iteration creates another iterator
    elif loader.persistent_workers:
        loader.load_state_dict(state)  # workers that do not persist start each epoch from this process's data set
    begin_epoch(loader)


def begin_epoch(loader: Any) -> None:
    """Make the next iteration of ``loader`` begin an epoch; litdata's would otherwise continue an interrupted one."""
    if getattr(loader, "restore", None) is True:
        loader.restore = False
