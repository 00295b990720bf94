"""A batch sampler of one process over the samples that a technique chose for an epoch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler


def interleaved(orders: Sequence[Tensor]) -> Tensor:
    """Merge the samples of all ranks in the order of use: first the first of each rank, then the second of each."""
    longest = max(len(order) for order in orders)
    padded = torch.full((len(orders), longest), -1, dtype=torch.long)
    for rank, order in enumerate(orders):
        padded[rank, : len(order)] = order
    flat = padded.t().flatten()
    return flat[flat >= 0]


def share(values: Tensor, rank: int, world_size: int, *, drop_last: bool) -> Tensor:
    """Take a rank's part of ``values`` like ``DistributedSampler``: every ``world_size``-th, the same number on each rank.

    Without ``drop_last``, the first values repeat to make the numbers even.
    """
    if drop_last:
        values = values[: len(values) // world_size * world_size]
    elif len(values) % world_size and len(values):
        repeats = -(-world_size // len(values)) + 1
        values = torch.cat([values] * repeats)[: -(-len(values) // world_size) * world_size]
    return values[rank::world_size]


_TIMES = 10  # passes over the data after which a sampler counts as endless


class EndlessSampler(ValueError):
    """A sampler never ends, so an epoch has no samples to choose from."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(
            f"the loader's sampler ({name}) had not ended after {count:,} items, so an epoch has no end. Give the loader a"
            " sampler that ends with the epoch"
        )


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return 0


def _is_many(indices: Any) -> bool:
    """Return whether a sampler yielded the indices of a batch rather than one index."""
    return (isinstance(indices, Sequence) and not isinstance(indices, str)) or bool(getattr(indices, "ndim", 0))


def as_list(indices: Any) -> Any:
    """Convert a batch's indices to a list of integers from a list, tuple, array or tensor, or return them unchanged."""
    if isinstance(indices, Tensor | np.ndarray) and indices.ndim == 1:
        return [int(index) for index in indices.tolist()]
    if isinstance(indices, list | tuple | range):
        return [int(index) if isinstance(index, Tensor | np.integer) else index for index in indices]
    return indices


def _maker(like: Any) -> Callable[[list[int]], Any]:
    """Return a function that converts a list of indices to the type of ``like``."""
    if isinstance(like, Tensor):
        return torch.tensor
    if isinstance(like, np.ndarray):
        return np.array
    return tuple if type(like) is tuple else list


class ChosenBatches:
    """A batch sampler (or a sampler of a loader without batches) that yields chosen samples, or else the original's.

    Everything except iteration and length is the original's.

    Args:
        original: the user's sampler, after Lightning's changes.
        batched: whether it is a batch sampler. A sampler of a loader without batches may also yield lists of indices
            (``DataLoader(batch_size=None, sampler=BatchSampler(...))``), which the data set then fetches at once.
        size: the number of samples of the data set.
    """

    def __init__(self, original: Any, *, batched: bool, size: int = 0) -> None:
        self.original = original
        self._most = _TIMES * size + 1000
        self.batched = batched or isinstance(original, BatchSampler)
        self._make: Callable[[list[int]], Any] = list  # converts a batch's indices to the original's type
        self.emitted = 0  # batches handed out in this epoch, also to workers
        self._own: list[list[int]] = []
        self._batches: list[list[int]] | None = None
        self._weights: list[Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in (
            "original",
            "batched",
            "emitted",
            "_most",
            "_make",
            "_own",
            "_batches",
            "_weights",
        ):
            raise AttributeError(name)
        return getattr(self.original, name)

    def __iter__(self) -> Iterator[Any]:
        self.emitted = 0
        if self._batches is None:
            for batch in self.original:
                self.emitted += 1
                yield batch
            return
        while self.emitted < len(self._batches):
            batch = self._batches[self.emitted]
            self.emitted += 1
            yield self._make(batch) if self.batched else batch[0]

    def __len__(self) -> int:
        return len(self.original) if self._batches is None else len(self._batches)

    # -- the user's own order

    def plain(self) -> Tensor:
        """Iterate the original for its indices in this epoch on this process, shape (n,), long."""
        if not self.batched:
            emitted = self._emitted(self.original)
            self.batched = bool(emitted) and _is_many(emitted[0])
            self._own = [as_list(indices) if self.batched else [int(indices)] for indices in emitted]
            self._make = _maker(emitted[0]) if self.batched else list
        elif type(self.original) is BatchSampler:  # its last batch may be dropped, but its samples can be chosen
            order = torch.tensor([int(index) for index in self._emitted(self.original.sampler)], dtype=torch.long)
            self._own = self._cut(order)
            return order
        else:
            emitted = self._emitted(self.original)
            self._own = [as_list(batch) for batch in emitted]
            self._make = _maker(emitted[0]) if emitted else list
        return _flat(self._own)

    def _emitted(self, sampler: Any) -> list[Any]:
        """Collect all that ``sampler`` yields.

        Raises:
            EndlessSampler: if it does not end.
        """
        found: list[Any] = []
        left = max(self._most, _TIMES * _length(sampler))
        for indices in sampler:
            found.append(indices)
            left -= 1
            if left < 0:
                raise EndlessSampler(type(sampler).__name__, len(found))
        return found

    @property
    def distributed(self) -> "DistributedSampler[Any] | None":
        """The sampler that divides the data set over the ranks, if there is one."""
        samplers = (self.original, getattr(self.original, "sampler", None))
        return next((s for s in samplers if isinstance(s, DistributedSampler)), None)

    # -- what was chosen

    def choose(self, indices: Tensor, weights: Tensor | None) -> None:
        """Use these indices, shape (n,), with their weights in the next epoch, in batches of the original's size.

        A custom batch sampler yields batches of its ``batch_size``, or else of its own largest size. Its grouping of samples is
        not kept.
        """
        self._batches = self._cut(indices)
        sizes = [len(batch) for batch in self._batches]
        self._weights = None if weights is None else list(weights[: sum(sizes)].split(sizes))

    def choose_batches(self, batches: list[list[int]]) -> None:
        """Use these batches of this process, of any sizes, in the next epoch."""
        self._batches, self._weights = batches, None

    def choose_own(self) -> None:
        """Use the batches that :meth:`plain` collected in the next epoch."""
        self._batches, self._weights = self._own, None

    @property
    def batch_size(self) -> int | None:
        """The size of a full batch of this process after :meth:`plain`, or None for a loader without batches."""
        size = getattr(self.original, "batch_size", None) if self.batched else None
        if self.batched and not isinstance(size, int):
            size = max((len(batch) for batch in self._own), default=1)
        return size

    def _cut(self, indices: Tensor) -> list[list[int]]:
        size = self.batch_size or 1
        cut = [batch.tolist() for batch in indices.split(size)] if len(indices) else []
        if cut and len(cut[-1]) < size and getattr(self.original, "drop_last", False):
            cut.pop()
        return cut

    @property
    def to_come(self) -> Tensor:
        """The indices of the batches that have not been handed out yet, shape (n,)."""
        return _flat((self._batches or [])[self.emitted :])

    def exchange(self, indices: Tensor, weights: Tensor | None) -> None:
        """Replace the indices of the batches to come by as many others."""
        assert self._batches is not None
        gone, left = self._batches[: self.emitted], [len(batch) for batch in self._batches[self.emitted :]]
        if self._weights is None and weights is not None:
            self._weights = [torch.ones(len(batch)) for batch in self._batches]
        if self._weights is not None:
            weights = torch.ones(len(indices)) if weights is None else weights
            self._weights = [*self._weights[: self.emitted], *weights.split(left)]
        self._batches = [*gone, *(batch.tolist() for batch in indices.split(left))]

    @property
    def weighted(self) -> bool:
        """Whether samples of this epoch have weights."""
        return self._weights is not None

    def weights(self, position: int) -> Tensor | None:
        """Return the weights of the samples of the batch at ``position`` in the epoch, (B,), or None."""
        return None if self._weights is None else self._weights[position]

    def state_dict(self) -> dict[str, Any] | None:
        """Return the chosen epoch, or None."""
        if self._batches is None:
            return None
        return {
            "indices": _flat(self._batches),
            "sizes": torch.tensor([len(batch) for batch in self._batches], dtype=torch.long),
            "weights": None if self._weights is None else torch.cat(self._weights),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a chosen epoch."""
        sizes = state["sizes"].tolist()
        self._batches = [batch.tolist() for batch in state["indices"].split(sizes)]
        self._weights = None if state["weights"] is None else list(state["weights"].split(sizes))


def _flat(batches: Iterable[list[int]]) -> Tensor:
    return torch.tensor([index for batch in batches for index in batch], dtype=torch.long)
