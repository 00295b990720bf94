"""The batches of an epoch whose samples a technique has chosen, as a batch sampler of one process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler


def interleaved(orders: Sequence[Tensor]) -> Tensor:
    """The samples of all ranks in the order in which they are seen: first each rank's first, then each one's second."""
    longest = max(len(order) for order in orders)
    padded = torch.full((len(orders), longest), -1, dtype=torch.long)
    for rank, order in enumerate(orders):
        padded[rank, : len(order)] = order
    flat = padded.t().flatten()
    return flat[flat >= 0]


def share(values: Tensor, rank: int, world_size: int, *, drop_last: bool) -> Tensor:
    """What ``DistributedSampler`` gives a rank of ``values``: every ``world_size``-th, as many as each other rank.

    Without ``drop_last`` the first ones come again to make the numbers even.
    """
    if drop_last:
        values = values[: len(values) // world_size * world_size]
    elif len(values) % world_size and len(values):
        repeats = -(-world_size // len(values)) + 1
        values = torch.cat([values] * repeats)[: -(-len(values) // world_size) * world_size]
    return values[rank::world_size]


_TIMES = 10  # how often an epoch may go over the data before its sampler counts as endless


class EndlessSampler(ValueError):
    """A sampler yields indices without end, so an epoch has no samples to choose from."""

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
    """Whether a sampler yielded a batch's indices, and not one index."""
    return (isinstance(indices, Sequence) and not isinstance(indices, str)) or bool(getattr(indices, "ndim", 0))


def as_list(indices: Any) -> Any:
    """A batch's indices as a list of integers, whether a list, a tuple, an array or a tensor holds them; else as they are."""
    if isinstance(indices, Tensor | np.ndarray) and indices.ndim == 1:
        return [int(index) for index in indices.tolist()]
    if isinstance(indices, list | tuple | range):
        return [int(index) if isinstance(index, Tensor | np.integer) else index for index in indices]
    return indices


def _maker(like: Any) -> Callable[[list[int]], Any]:
    """What makes a batch's indices of the form of ``like``."""
    if isinstance(like, Tensor):
        return torch.tensor
    if isinstance(like, np.ndarray):
        return np.array
    return tuple if type(like) is tuple else list


class ChosenBatches:
    """A batch sampler, or a sampler of a loader without batches, that yields what was chosen; the original's until then.

    Everything but iteration and length is the original's.

    Args:
        original: the user's, as Lightning has made it.
        batched: whether it is a batch sampler. A sampler of a loader without batches may yield lists of indices too
            (``DataLoader(batch_size=None, sampler=BatchSampler(...))``), which the data set then fetches at once.
        size: samples of the data set.
    """

    def __init__(self, original: Any, *, batched: bool, size: int = 0) -> None:
        self.original = original
        self._most = _TIMES * size + 1000
        self.batched = batched or isinstance(original, BatchSampler)
        self._make: Callable[[list[int]], Any] = list  # a batch's indices, in the form in which the original gives them
        self.emitted = 0  # batches that were handed out in this epoch, to workers too
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
        """The indices that the original yields in this epoch on this process, shape (n,), long; it is iterated for it."""
        if not self.batched:
            emitted = self._emitted(self.original)
            self.batched = bool(emitted) and _is_many(emitted[0])
            self._own = [as_list(indices) if self.batched else [int(indices)] for indices in emitted]
            self._make = _maker(emitted[0]) if self.batched else list
        elif type(self.original) is BatchSampler:  # whose last batch may be dropped, and yet be chosen from
            order = torch.tensor([int(index) for index in self._emitted(self.original.sampler)], dtype=torch.long)
            self._own = self._cut(order)
            return order
        else:
            emitted = self._emitted(self.original)
            self._own = [as_list(batch) for batch in emitted]
            self._make = _maker(emitted[0]) if emitted else list
        return _flat(self._own)

    def _emitted(self, sampler: Any) -> list[Any]:
        """All that ``sampler`` yields.

        Raises:
            EndlessSampler: if that has no end.
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
        """Let the next epoch have these indices, shape (n,), with these weights of theirs, cut as the original's batches are.

        A batch sampler of another make than torch's yields batches of the largest size that its own had, by its
        ``batch_size`` where it has one; how it groups samples is not kept.
        """
        self._batches = self._cut(indices)
        sizes = [len(batch) for batch in self._batches]
        self._weights = None if weights is None else list(weights[: sum(sizes)].split(sizes))

    def choose_batches(self, batches: list[list[int]]) -> None:
        """Let the next epoch have these batches of this process, of any sizes."""
        self._batches, self._weights = batches, None

    def choose_own(self) -> None:
        """Let the next epoch have the batches that :meth:`plain` has met."""
        self._batches, self._weights = self._own, None

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch of this process, once :meth:`plain` has been called; None for a loader without batches."""
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
        """The indices of batches that are not handed out yet, shape (n,)."""
        return _flat((self._batches or [])[self.emitted :])

    def exchange(self, indices: Tensor, weights: Tensor | None) -> None:
        """Let the batches to come have these, as many as they had."""
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
        """Whether samples of this epoch were given weights."""
        return self._weights is not None

    def weights(self, position: int) -> Tensor | None:
        """The weights of the samples of the batch at ``position`` in the epoch, (B,); None where none were given."""
        return None if self._weights is None else self._weights[position]

    def state_dict(self) -> dict[str, Any] | None:
        """The chosen epoch; None where none was chosen."""
        if self._batches is None:
            return None
        return {
            "indices": _flat(self._batches),
            "sizes": torch.tensor([len(batch) for batch in self._batches], dtype=torch.long),
            "weights": None if self._weights is None else torch.cat(self._weights),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a chosen epoch."""
        sizes = state["sizes"].tolist()
        self._batches = [batch.tolist() for batch in state["indices"].split(sizes)]
        self._weights = None if state["weights"] is None else list(state["weights"].split(sizes))


def _flat(batches: Iterable[list[int]]) -> Tensor:
    return torch.tensor([index for batch in batches for index in batch], dtype=torch.long)
