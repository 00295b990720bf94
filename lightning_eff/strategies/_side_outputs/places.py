"""Finds the places where blocks leave tensors for the loss, reads them there, and puts other tensors there instead.

A mixture of experts gives its balance loss, or its router's logits, to code behind the blocks. It returns them beside the
hidden state, sets an attribute of a module, appends to a list that a module has, or lets transformers record them.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """Where a block leaves a tensor.

    Attributes:
        kind: "output" for an item of its output, "attribute" of a module, "list" for an item that it appends to an attribute
            of a module, "record" for an item that transformers appends to a recorded output.
        path: the path of the module.
        name: the name of the attribute or record, or the index in the output.
        order: which of the tensors that the block appends it is.
    """

    kind: Literal["output", "attribute", "list", "record"]
    path: str
    name: str | int
    order: int = 0

    def __str__(self) -> str:
        if self.kind == "output":
            return f"output {self.name} of a block"
        return str(self.name) if self.kind == "record" or not self.path else f"{self.path}.{self.name}"


class Before(NamedTuple):
    """The state of all places before a block's call.

    Attributes:
        values: tensors in attributes, by path and name.
        lists: lists in attributes, with their lengths.
        records: the lengths of transformers' records, by name.
    """

    values: dict[tuple[str, str], Tensor]
    lists: dict[tuple[str, str], tuple[list[Any], int]]
    records: dict[str, int]


Values = Sequence[Tensor | None]
"""What a block left in its places, in their order; None where it left nothing."""


def detached(values: Values) -> Values:
    """Return the tensors without their graphs."""
    return [None if value is None else value.detach() for value in values]


def _counts(value: Any, hidden: Tensor) -> bool:
    """Return whether ``value`` is a tensor, smaller than the hidden state, that the loss can train a block through."""
    trains = isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None
    return trains and value is not hidden and value.numel() < hidden.numel()


def _recorded() -> dict[str, list[Any]]:
    """Return the lists in which transformers records outputs in the pass that runs, by name."""
    library = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(library, "_active_collector", None)
    found = None if collector is None else collector.get()
    return {} if found is None else {key: value for key, value in found.items() if isinstance(value, list)}


def _appended(before: tuple[list[Any], int] | None, now: Any) -> list[Any]:
    """Return the items that a list has more than before, which was perhaps another one."""
    if before is None or not isinstance(now, list):
        return []
    old, length = before
    same = now is old or (len(now) >= length and all(a is b for a, b in zip(now, old[:length], strict=False)))
    return now[length:] if same else []


class SideOutputs:
    """The tensors that the blocks of a module leave for code behind them.

    Only tensors that are smaller than the hidden state count. Larger ones would cost more to send than the hidden state does.

    Args:
        module: the module, whose own blocks are in their places now.
        who: name of the caller in messages.

    Attributes:
        places: the places of each block that leaves something, by its index.
    """

    def __init__(self, module: nn.Module, *, who: str) -> None:
        self.places: dict[int, tuple[Place, ...]] = {}
        self.who = who
        self._modules = dict(module.named_modules())
        self._learnt: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.places)

    def upto(self, end: int) -> list[int]:
        """Return the indices of the blocks before ``end`` that leave something, in order."""
        return [index for index in sorted(self.places) if index < end]

    def flat(self, found: Mapping[int, Values], end: int) -> list[Tensor | None]:
        """Return the tensors that the blocks before ``end`` left, one after the other."""
        nothing = {index: [None] * len(self.places[index]) for index in self.upto(end)}
        return [value for index in self.upto(end) for value in found.get(index, nothing[index])]

    def refuse_missing(self, found: Mapping[int, Values], end: int) -> None:
        """Raise ``ValueError`` if a block before ``end`` left nothing in one of its places."""
        for index in self.upto(end):
            values = found.get(index) or [None] * len(self.places[index])
            for place, value in zip(self.places[index], values, strict=True):
                if value is None:
                    raise ValueError(
                        f"{self.who}: block {index} left no tensor in {place}, as it did in the first step, but the ranks of"
                        " other blocks wait for it. Let each block leave one in each training step, such as a zero."
                    )

    def by_block(self, values: Sequence[Tensor | None], end: int) -> dict[int, Values]:
        """Return ``values``, as :meth:`flat` gives them, by block."""
        found: dict[int, Values] = {}
        at = 0
        for index in self.upto(end):
            found[index] = values[at : at + len(self.places[index])]
            at += len(self.places[index])
        return found

    # -- around a block's call

    def before(self, index: int, *, learn: bool = False) -> Before | None:
        """Return the state of the places before a block's call: of the block's own places, or of all with ``learn``."""
        if not learn and index not in self.places:
            return None
        values: dict[tuple[str, str], Tensor] = {}
        lists: dict[tuple[str, str], tuple[list[Any], int]] = {}
        for path, name, value in self._all() if learn else self._own(index):
            if isinstance(value, Tensor):
                values[path, name] = value
            elif isinstance(value, list):
                lists[path, name] = (value, len(value))
        return Before(values, lists, {name: len(items) for name, items in _recorded().items()})

    def _all(self) -> Iterator[tuple[str, str, Any]]:
        for path, m in self._modules.items():
            for name, value in [*m.__dict__.items()]:
                if isinstance(value, Tensor | list):
                    yield path, name, value

    def _own(self, index: int) -> Iterator[tuple[str, str, Any]]:
        for place in self.places[index]:
            if place.kind in ("attribute", "list"):
                name = str(place.name)
                yield place.path, name, self._modules[place.path].__dict__.get(name)

    def learn(self, index: int, before: Before, hidden: Tensor, rest: Sequence[Any]) -> None:
        """Find the places of a block. A call without gradients shows none.

        Args:
            index: the block's index.
            before: the state before the call.
            hidden: the block's hidden state.
            rest: the other items of its output.
        """

        if not torch.is_grad_enabled():
            return
        self._learnt.add(index)
        found = [Place("output", "", i) for i, value in enumerate(rest, 1) if _counts(value, hidden)]
        found += self._changed(before, hidden)
        if found:
            self.places[index] = tuple(dict.fromkeys((*self.places.get(index, ()), *found)))

    def _changed(self, before: Before, hidden: Tensor) -> list[Place]:
        """Return the places in modules and records where tensors were left since ``before``."""
        found: list[Place] = []
        seen: set[int] = set()
        for path, name, value in self._all():
            if isinstance(value, Tensor):
                if _counts(value, hidden) and before.values.get((path, name)) is not value:
                    found.append(Place("attribute", path, name))
            elif id(value) not in seen:  # modules often share a list
                seen.add(id(value))
                items = _appended(before.lists.get((path, name)), value)
                found += [Place("list", path, name, i) for i, item in enumerate(items) if _counts(item, hidden)]
        for name, items in _recorded().items():
            more = items[before.records.get(name, 0) :]
            found += [Place("record", "", name, i) for i, item in enumerate(more) if _counts(item, hidden)]
        return found

    def refuse_new(self, blocks: Collection[int], before: Before, hidden: Tensor) -> None:
        """Raise ``ValueError`` if blocks left tensors in modules or records where they left none when places were learnt.

        Args:
            blocks: the indices of those that were called one after the other.
            before: the state of all places before the first of them.
            hidden: the hidden state behind the last of them.
        """
        if self._learnt.issuperset(blocks):
            known = {place[:3] for places in self.places.values() for place in places}
            self._refuse([place for place in self._changed(before, hidden) if place[:3] not in known])

    def refuse_new_outputs(self, index: int, hidden: Tensor, rest: Sequence[Any]) -> None:
        """Raise ``ValueError`` if a block returned tensors next to its hidden state where it returned none."""
        if index in self._learnt:
            known = {place.name for place in self.places.get(index, ()) if place.kind == "output"}
            found = [Place("output", "", i) for i, value in enumerate(rest, 1) if _counts(value, hidden)]
            self._refuse([place for place in found if place.name not in known])

    def _refuse(self, new: Sequence[Place]) -> None:
        if new:
            raise ValueError(
                f"{self.who}: blocks leave a tensor with a gradient in {new[0]}, but left none there in the first step. Other"
                " ranks do not get it, so a loss that uses it would train on a part. Leave one in each step, such as a zero, or"
                " store it detached (.detach())."
            )

    def left(self, index: int, before: Before | None, rest: Sequence[Any]) -> Values:
        """Return the tensors that a block left in its places.

        Raises:
            ValueError: if it left more than when its places were learnt.
        """
        if before is None:
            return ()
        values: list[Tensor | None] = []
        for place in self.places[index]:
            value: Any = None
            if place.kind == "output":
                value = rest[int(place.name) - 1] if int(place.name) <= len(rest) else None
            elif place.kind == "attribute":
                value = self._modules[place.path].__dict__.get(str(place.name))
                value = None if value is before.values.get((place.path, str(place.name))) else value
            else:
                items = self._items(place, before)
                value = items[place.order] if place.order < len(items) else None
                self._check(index, place, items)
            values.append(value if isinstance(value, Tensor) else None)
        return values

    def _items(self, place: Place, before: Before) -> list[Any]:
        name = str(place.name)
        if place.kind == "record":
            return _recorded().get(name, [])[before.records.get(name, 0) :]
        return _appended(before.lists.get((place.path, name)), self._modules[place.path].__dict__.get(name))

    def _check(self, index: int, place: Place, items: list[Any]) -> None:
        known = {p.order for p in self.places[index] if p[:3] == place[:3]}
        more = [i for i, item in enumerate(items) if isinstance(item, Tensor) and item.requires_grad and i not in known]
        if more:
            raise ValueError(
                f"{self.who}: block {index} appends {len(items)} tensors to {place}, but appended {len(known)} in the first"
                " step, and each rank must know how many tensors the others' blocks leave. Append the same number in each step."
            )

    # -- in place of a block's call

    def put(self, index: int, values: Values) -> None:
        """Leave ``values`` in a block's places, except in its output, as if it had been called."""
        for place, value in zip(self.places.get(index, ()), values, strict=False):
            if value is None or place.kind == "output":
                continue
            name = str(place.name)
            if place.kind == "attribute":
                self._modules[place.path].__dict__[name] = value
                continue
            items = _recorded().get(name) if place.kind == "record" else self._modules[place.path].__dict__.get(name)
            if isinstance(items, list):
                items.append(value)

    def replace(self, index: int, before: Before | None, values: Values) -> None:
        """Replace the tensors that a block left by ``values``, except in its output."""
        for place, value in zip(self.places.get(index, ()), values, strict=False):
            if before is None or value is None or place.kind == "output":
                continue
            name = str(place.name)
            if place.kind == "attribute":
                self._modules[place.path].__dict__[name] = value
            elif place.kind == "record":
                _recorded()[name][before.records.get(name, 0) + place.order] = value
            else:
                _, length = before.lists[place.path, name]
                self._modules[place.path].__dict__[name][length + place.order] = value

    def outputs(self, index: int, values: Values) -> dict[int, Tensor]:
        """Return those of ``values`` that belong into the block's output, by their index there."""
        places = self.places.get(index, ())
        return {
            int(place.name): value
            for place, value in zip(places, values, strict=False)
            if place.kind == "output" and value is not None
        }

    def __str__(self) -> str:
        names = list(dict.fromkeys(str(place) for places in self.places.values() for place in places))
        return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
