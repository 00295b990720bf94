"""Loaders that keep their own state: torchdata's ``StatefulDataLoader``, litdata's ``StreamingDataLoader``, users' own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core import rng


def has_state(value: Any) -> bool:
    """Whether ``value`` can tell where it is, and go on from there.

    Some loaders have the two methods and no state behind them (accelerate's, around a plain ``DataLoader``).
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
    """Whether ``loader`` keeps its state in the way of torchdata's ``StatefulDataLoader``."""
    return getattr(getattr(type(loader), "state_dict", None), "__module__", "").startswith("torchdata.")


def keeps_state(loader: Any) -> bool:
    """Whether ``loader`` must be resumed from its own state.

    torchdata's over a map-style data set without a state of its own need not be: its samplers and workers begin an epoch
    from the random state alone, as a plain ``DataLoader``'s do, and that repeats random augmentation in workers too, which
    its own state leaves out.
    """
    if not has_state(loader):
        return False
    if not is_torchdata(loader):
        return True
    return isinstance(loader.dataset, IterableDataset) or has_state(loader.dataset)


def own_state(loader: Any) -> dict[str, Any] | None:
    """The loader's own state; None where no iteration has begun, since asking might begin one."""
    if is_torchdata(loader) and loader._iterator is None:
        return None
    with rng.fork():
        return loader.state_dict()


@contextmanager
def generator_in_state(loader: Any, state: dict[str, Any]) -> Iterator[None]:
    """What ``loader`` draws as an iteration begins (its workers' seed) comes from ``state``, and the global one stays."""
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
    """Bring ``loader`` to where an epoch has ended with ``state``, so that its next iteration begins another."""
    if not is_torchdata(loader):
        loader.load_state_dict(state)
    elif loader.num_workers == 0:
        loader.load_state_dict(state)
        with rng.fork():
            loader._get_iterator()  # the data set takes its state here; the next iteration makes another iterator
    elif loader.persistent_workers:
        loader.load_state_dict(state)  # else, workers begin each epoch with the data set of this process
    begin_epoch(loader)


def begin_epoch(loader: Any) -> None:
    """The next iteration of ``loader`` begins an epoch: litdata's would go on in a resumed one that was cut short."""
    if getattr(loader, "restore", None) is True:
        loader.restore = False
