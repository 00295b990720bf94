"""Which blocks of a network run, as numbers."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import nn


class Runs(Protocol):
    """A stack some of whose blocks run."""

    def running(self) -> list[nn.Module]: ...


def running(stacks: Mapping[str, Runs]) -> Iterator[tuple[str, int, int]]:
    """For each stack, by path: how many of its blocks run, and how many of those take gradients."""
    for path, stack in sorted(stacks.items()):
        run = stack.running()
        yield path, len(run), sum(any(p.requires_grad for p in block.parameters()) for block in run)
