"""Splits the work of a step so that its temporary tensors stay small."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor

_Item = TypeVar("_Item")

#: bytes that are stacked at a time on a CPU, where more only leaves the cache, and elsewhere, where few calls matter
STACKED = (4 << 20, 64 << 20)


def limit_of(tensor: Tensor, limits: tuple[int, int]) -> int:
    """Return the first of ``limits`` for a tensor on a CPU, and the second elsewhere."""
    return limits[0] if tensor.device.type == "cpu" else limits[1]


def limit_for(tensor: Tensor, limits: tuple[int, int], sizes: Iterable[int], ranks: int) -> int:
    """Return :func:`limit_of` for work that ``ranks`` share, which is enough for one of the largest items on each of them."""
    limit = limit_of(tensor, limits)
    return ranks * max(limit, max(sizes, default=0)) if ranks > 1 else limit


def runs(items: Iterable[_Item], sizes: Iterable[int], limit: int) -> Iterator[list[_Item]]:
    """Split ``items`` into consecutive runs whose sizes sum up to at most ``limit``, or that have one item."""
    run: list[_Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if run and total + size > limit:
            yield run
            run, total = [], 0
        run.append(item)
        total += size
    if run:
        yield run
