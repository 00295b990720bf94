"""Gathers the tensors that blocks leave for each token next to their hidden state, such as the logits of routers.

The module computes its loss of routers from the tokens of all ranks, as in one process. A value that a block computes from its
tokens, such as a balance loss, cannot be joined.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_eff.strategies._context.arguments import holds_tensors
from lightning_eff.strategies._context.messages import Share
from lightning_eff.strategies._side_outputs.places import Before, SideOutputs


class Way(NamedTuple):
    """Where a tensor has the tokens.

    Attributes:
        dim: the dimension.
        flat: whether it has samples and tokens together.
    """

    dim: int
    flat: bool


class Joining:
    """Gathers the values that blocks leave for each token.

    Args:
        module: the module.
        count: the number of its blocks.
        who: name of the caller in messages.

    Attributes:
        beside: the places.
    """

    def __init__(self, module: nn.Module, count: int, *, who: str) -> None:
        self.beside = SideOutputs(module, who=who)
        self._count = count
        self._first: Before | None = None  # before the first block of a step
        self._shapes: dict[int, list[torch.Size | None]] = {}
        self._ways: dict[tuple[int, int], Way | None] = {}

    # -- on whole sequences

    def before(self, index: int) -> Before | None:
        """Return the state before a block is called on all tokens; None if a backward pass recomputes it."""
        return self.beside.before(index, learn=True) if torch._C._current_graph_task_id() == -1 else None

    def learn(self, index: int, before: Before | None, hidden: Tensor, rest: Sequence[Any] | None) -> None:
        """Find the tensors that a block left, and note their shapes."""
        if before is not None:
            self.beside.learn(index, before, hidden, rest or ())
            if index in self.beside.places:
                left = self.beside.left(index, before, rest or ())
                self._shapes[index] = [None if value is None else value.shape for value in left]

    # -- on a part of the tokens

    def entering(self, index: int) -> Before | None:
        """Return the state before a block is called on this rank's tokens."""
        if index == 0:
            self._first = self.before(0)
        return self.beside.before(index)

    def joined(
        self, index: int, before: Before | None, hidden: Tensor, rest: Sequence[Any], share: Share, dim: int
    ) -> list[Any]:
        """Leave the values of all tokens instead of those of this rank, and return the block's further outputs; collective.

        Args:
            index: the block's index.
            before: the state before its call.
            hidden: the hidden state of this rank's tokens.
            rest: the other items of its output.
            share: this rank's part of the tokens.
            dim: the dimension of tokens in the hidden state.
        """
        if index == self._count - 1 and self._first is not None:
            first, self._first = self._first, None
            self.beside.refuse_new(range(self._count), first, hidden)
        values = self.beside.left(index, before, rest)
        joined: list[Tensor | None] = []
        for order, (value, whole) in enumerate(zip(values, self._shapes.get(index, ()), strict=True)):
            if value is not None and whole is not None and (index, order) not in self._ways:
                self._ways[index, order] = _way(whole, value.shape, hidden.shape, share, dim)
            way = self._ways.get((index, order))
            joined.append(None if way is None or value is None else _join(value, way, hidden.shape, share, dim))
        self.beside.replace(index, before, joined)
        others = self.beside.outputs(index, joined)
        return [others.get(i, item) for i, item in enumerate(rest, 1)]

    def outputs(self, index: int) -> set[int]:
        """Return the indices of a block's further outputs that are joined."""
        places = enumerate(self.beside.places.get(index, ()))
        return {int(place.name) for i, place in places if place.kind == "output" and self._ways.get((index, i))}

    @property
    def apart(self) -> list[str]:
        """The places of tensors that each rank computes from its own tokens."""
        found = [str(self.beside.places[index][order]) for (index, order), way in self._ways.items() if way is None]
        return list(dict.fromkeys(found))

    def can_join(self, rest: Sequence[Any], hidden: Tensor) -> bool:
        """Return whether the tensors in the further outputs of the first block can have values for each token."""
        tokens = {hidden.shape[0], hidden.shape[1], hidden.shape[0] * hidden.shape[1]}
        places = zip(self.beside.places.get(0, ()), self._shapes.get(0, ()), strict=True)
        known = {int(p.name) for p, shape in places if p.kind == "output" and shape and tokens & {*shape}}
        return not any(holds_tensors(item) for i, item in enumerate(rest, 1) if i not in known)


def _way(whole: torch.Size, part: torch.Size, hidden: torch.Size, share: Share, dim: int) -> Way | None:
    """Return where a tensor of these shapes, of all tokens and of this rank's, has the tokens."""
    changed = [i for i, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    if len(whole) != len(part) or len(changed) != 1:
        return None
    (at,) = changed
    for way, times in ((Way(at, flat=False), 1), (Way(at, flat=True), hidden[1 - dim])):
        if (whole[at], part[at]) == (times * share.whole, times * share.length):
            return way
    return None


def _join(value: Tensor, way: Way, hidden: torch.Size, share: Share, dim: int) -> Tensor:
    if not way.flat:
        return share.gathered(value, way.dim)
    sizes = (hidden[0], hidden[1])  # samples and tokens, in the order of the hidden state
    return share.gathered(value.unflatten(way.dim, sizes), way.dim + dim).flatten(way.dim, way.dim + 1)
