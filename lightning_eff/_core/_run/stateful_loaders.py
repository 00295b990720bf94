"""Loaders with their own state: torchdata's ``StatefulDataLoader`` and ``nodes.Loader``, litdata's, and custom ones."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_eff._core import rng

_NOTHING = object()


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
    """Return whether ``loader`` is a ``StatefulDataLoader`` of torchdata, or of a class derived from it."""
    return _comes_from(loader, "torchdata.stateful_dataloader")


def is_nodes(loader: Any) -> bool:
    """Return whether ``loader`` is a ``Loader`` of ``torchdata.nodes``, or of a class derived from it."""
    return _comes_from(loader, "torchdata.nodes")


def _comes_from(loader: Any, package: str) -> bool:
    return any(cls.__module__.startswith(package) for cls in type(loader).__mro__)


def _nodes(root: Any) -> list[Any]:
    """Return the nodes that ``root`` takes items from, itself first, also those inside of other nodes."""
    from torchdata.nodes import BaseNode  # optional, and imported if there is such a loader

    found = [root]
    for node in found:  # grows
        for value in list(vars(node).values()):
            values = value.values() if isinstance(value, dict) else [value]
            found += [one for one in values if isinstance(one, BaseNode) and not any(one is other for other in found)]
    return found


def node_parts(loader: Any) -> list[Any]:
    """Return what the nodes of a ``torchdata.nodes.Loader`` hold: samplers, iterables and functions.

    Iterators are left out, because they exist only once an iteration has begun.
    """
    nodes = _nodes(loader.root)
    held = [value for node in nodes for name, value in vars(node).items() if not name.startswith("_")]
    return [value for value in held if not any(value is node for node in nodes)]


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


def own_state(loader: Any, *, begun: bool = False) -> dict[str, Any] | None:
    """Return the loader's own state; None if no iteration has begun, because reading it might begin one.

    Args:
        loader: the loader.
        begun: whether the running iteration has given a batch, so that reading the state draws no random numbers.
    """
    if (is_torchdata(loader) and loader._iterator is None) or (is_nodes(loader) and loader._it is None):
        return None
    if begun or is_nodes(loader):  # threads of nodes may draw meanwhile, which restoring the global state would undo
        return loader.state_dict()
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


def load(loader: Any, state: dict[str, Any]) -> None:
    """Load a copy of ``state``, which the loader may change."""
    loader.load_state_dict(deepcopy(state))
    with suppress(TypeError, NotImplementedError):
        len(
            loader
        )  # litdata's combined data sets forget the loader's workers and batch size until it is asked for its length


def why_other(loader: Any) -> tuple[str, bool]:
    """Return why the state of ``loader`` does not determine its batches, "" if none is known, and whether nothing else does."""
    if type(getattr(loader, "dataset", None)).__module__.startswith("litdata.") and hasattr(
        loader.dataset, "_datasets"
    ):
        return f"a {type(loader.dataset).__name__} does not record which worker read which samples", False
    if not is_nodes(loader):
        return "", False
    nodes = _nodes(loader.root)
    samplers = [node.sampler for node in nodes if hasattr(node, "sampler")]
    drawn = [
        one for one in samplers if not (has_state(one) or hasattr(one, "set_epoch") or type(one) is SequentialSampler)
    ]
    several = len(drawn) > 1 or any(hasattr(node, "source_nodes") for node in nodes)
    if not drawn or not several:
        return "", False
    return "its samplers draw several orders in an epoch", any(getattr(one, "generator", one) is None for one in drawn)


def finish_epoch(loader: Any, state: dict[str, Any]) -> None:
    """Bring ``loader`` to the end of the epoch that ended with ``state``, so that its next iteration begins another."""
    if is_nodes(loader):
        _finish_nodes(loader, state)
    elif not is_torchdata(loader):
        load(loader, state)
    elif loader.num_workers == 0:
        with rng.fork():
            _finish_torchdata(loader, state)
    elif loader.persistent_workers:
        load(loader, state)  # workers that do not persist start each epoch from this process's data set
    begin_epoch(loader)


def _finish_torchdata(loader: Any, state: dict[str, Any]) -> None:
    """Leave the data set of this process as an epoch leaves it; the next iteration creates another iterator."""
    load(loader, state)
    iterator = loader._get_iterator()  # restores the data set's state
    if not isinstance(loader.dataset, IterableDataset):
        return
    # some streams begin anew with each iteration, except for the first one after their state is restored
    if not iterator._finished:
        if not _goes_on(loader, state):
            next(iterator, None)
    elif next(iter(iterator._dataset_fetcher.dataset_iter), _NOTHING) is not _NOTHING:
        load(loader, state)  # the state is that of the next epoch's beginning
        loader._get_iterator()


def _goes_on(loader: Any, state: dict[str, Any]) -> bool:
    """Return whether a new iteration continues where the stream was, which is tried on copies."""
    places = []
    for anew in (True, False):
        twin = copy(loader)
        try:
            twin.__dict__["dataset"] = deepcopy(loader.dataset)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            rank_zero_warn(
                f"{type(loader.dataset).__name__}: the stream cannot be copied ({error}), so it is not known whether a new"
                " iteration begins anew. This run assumes that it continues where the last epoch ended. Resume from a"
                " checkpoint within an epoch."
            )
            return True
        load(twin, state)
        iterator = twin._get_iterator()
        next(iterator, None)
        if anew:
            iterator = twin._get_iterator()
        next(iterator, None)
        made = iterator.state_dict()
        places.append(pickle.dumps((made["dataset_state"], made["fetcher_state"])))
    return places[0] == places[1]


def _finish_nodes(loader: Any, state: dict[str, Any]) -> None:
    """Leave the nodes as an epoch leaves them, with an iteration that has begun, so that samplers count the epoch."""
    restarts, loader.restart_on_stop_iteration = loader.restart_on_stop_iteration, False
    try:
        with rng.fork():
            load(loader, state)
            next(iter(loader), None)
    finally:
        loader.restart_on_stop_iteration = restarts


def begin_epoch(loader: Any) -> None:
    """Make the next iteration of ``loader`` begin an epoch; litdata's would otherwise continue an interrupted one."""
    if getattr(loader, "restore", None) is True:
        loader.restore = False


def begin_epoch_from(loader: Any, state: dict[str, Any] | None, *, mid_epoch: bool) -> None:
    """Make the next iteration of ``loader`` begin the epoch that once began from ``state``; None if the loader was new.

    Args:
        loader: the loader.
        state: its own state at the end of the epoch before that one.
        mid_epoch: whether the state is of a mid-epoch checkpoint of a plain Trainer, with which the iteration went on.
    """
    if state is None:
        begin_epoch(loader)
    elif mid_epoch:
        load(loader, state)
    else:
        finish_epoch(loader, state)


def wait_for_first(loader: Any, iterator: Any) -> None:
    """Wait until the threads of a ``torchdata.nodes.Loader`` have made a batch, and so have drawn what they begin with."""
    if is_nodes(loader) and callable(has_next := getattr(iterator, "has_next", None)):
        has_next()


def stop_threads(loader: Any) -> None:
    """Stop the threads of the iteration of a ``torchdata.nodes.Loader`` that ends, before they draw more random numbers.

    Lightning begins an iteration to check the loader, whose threads would otherwise draw while another one begins.
    """
    if is_nodes(loader):
        for node in _nodes(loader.root):
            for held in list(vars(node).values()):
                if callable(stop := getattr(held, "_shutdown", None)):
                    stop()
