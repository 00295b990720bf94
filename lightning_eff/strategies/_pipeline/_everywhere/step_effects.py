"""Shares the effects of ``training_step`` on metrics, lists and attributes of the module.

Only the last stage finishes the step. So its rank sends the changes to the other ranks. Changes of metrics and lists in the
passes of other stages are undone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_eff._core._lightning.names import ROOTS
from lightning_eff.strategies._pipeline._everywhere.sending import broadcast
from lightning_eff.strategies._pipeline.shared_state import Ground

_NOT_THEIRS = ("torch.", "torchvision.", "torchmetrics.", "lightning_eff.", *(f"{root}." for root in ROOTS))
_PLAIN = {*nn.Module().__dict__, *pl.LightningModule().__dict__}
_GROWING = (list, deque)
_FILLED = (list, deque, dict, set)
_VALUES = (Tensor, int, float, str, type(None))
_METRIC = ("_update_count", "_computed", "_forward_cache")
_LARGE, _DEEP = 64, 3  # containers are compared entry by entry up to this size and depth


@dataclass
class _Note:
    """A record of an attribute: the object, its length and last item, and records of a small container's items.

    A dict has records of every entry, and a list has records of the containers in it, by index.
    """

    value: Any
    length: int = 0
    last: Any = None
    entries: "dict[Any, _Note] | None" = None

    @staticmethod
    def of(value: Any, deep: int = _DEEP) -> "_Note":
        if not isinstance(value, _FILLED):
            return _Note(value)
        note = _Note(value, len(value), value[-1] if isinstance(value, _GROWING) and value else None)
        if deep and len(value) <= _LARGE:
            if isinstance(value, dict):
                note.entries = {key: _Note.of(item, deep - 1) for key, item in value.items()}
            elif isinstance(value, list):
                items = [(i, item) for i, item in enumerate(value) if isinstance(item, _FILLED)]
                note.entries = {i: _Note.of(item, deep - 1) for i, item in items}
        return note

    def grew(self, now: Any) -> bool:
        """Whether ``now`` is the same list with items appended."""
        same = isinstance(now, list) and now is self.value and len(now) >= self.length
        return same and (self.length == 0 or now[self.length - 1] is self.last)

    def change(self, now: Any) -> tuple[str, Any] | None:
        """Return the change: ("more", items), ("entries", {key: change}), ("whole", value), or None."""
        if isinstance(now, list) and self.grew(now):
            entries = self._entries_of({i: now[i] for i in self.entries or ()})
            if len(now) > self.length:
                return ("whole", now) if entries else ("more", now[self.length :])
            return ("entries", entries) if entries else None
        if isinstance(now, dict) and now is self.value and self.entries is not None:
            if self.entries.keys() <= now.keys():
                entries = self._entries_of(now)
                return ("entries", entries) if entries else None
        elif isinstance(now, _FILLED):
            last = now[-1] if isinstance(now, _GROWING) and now else None
            if now is self.value and len(now) == self.length and last is self.last:
                return None
        elif now is self.value or (
            type(now) in (int, float, str) and type(now) is type(self.value) and now == self.value
        ):
            return None
        return "whole", now

    def _entries_of(self, now: dict[Any, Any]) -> dict[Any, Any]:
        notes = self.entries or {}
        found = {key: notes.get(key, _NEW).change(item) for key, item in now.items()}
        return {key: change for key, change in found.items() if change is not None}

    def put_back(self) -> None:
        """Remove items that were appended to a list, also to lists in dicts."""
        if isinstance(self.value, list) and self.grew(self.value):
            del self.value[self.length :]
        for note in (self.entries or {}).values():
            note.put_back()


_NEW = _Note(object())


def _changed(now: Any, change: tuple[str, Any]) -> Any:
    """Apply ``change`` to ``now``, in place if possible, and return the result."""
    kind, value = change
    if kind == "more" and isinstance(now, list):
        return cast("list[Any]", now).extend(value) or now
    if kind == "entries" and isinstance(now, dict | list):
        for key, inner in value.items():
            now[key] = _changed(now.get(key) if isinstance(now, dict) else now[key], inner)
        return now
    if kind == "entries":
        return {key: _changed(None, inner) for key, inner in value.items()}
    if isinstance(now, list) and isinstance(value, list):
        now[:] = value
        return now
    return value


class Leavings:
    """Shares the step's effects from the last stage's rank with all ranks.

    Args:
        ground: the module and its layout.
        metrics: the module's metrics.
    """

    def __init__(self, ground: Ground, metrics: Sequence[Metric]) -> None:
        self._ground, self._metrics = ground, metrics
        self._collections = [m for m in ground.module.modules() if isinstance(m, MetricCollection)]
        inside = {id(m) for block in ground.stack.blocks for m in block.modules()}
        root = ground.module
        theirs = [
            m for m in root.modules() if id(m) not in inside and not f"{type(m).__module__}.".startswith(_NOT_THEIRS)
        ]
        #: containers that inner modules have from the start; the module's own attributes are checked in each step
        self._fixed = [
            (m.__dict__, key)
            for m in theirs
            for key, value in m.__dict__.items()
            if m is not root and key not in _PLAIN and isinstance(value, _FILLED)
        ]
        self._notes: list[tuple[dict[str, Any], str, _Note]] = []
        self._counts: list[tuple[int, dict[str, int]]] = []

    def _places(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        own = self._ground.module.__dict__
        for key in sorted(own.keys() - _PLAIN):
            value = own[key]
            if isinstance(value, (*_FILLED, *_VALUES)) or _plain_tuple(value):
                yield own, key, value
        for namespace, key in self._fixed:
            if key in namespace:
                yield namespace, key, namespace[key]

    def begin(self) -> None:
        """On the last stage's rank, record the state before the batch's passes."""
        self._notes = [(namespace, key, _Note.of(value)) for namespace, key, value in self._places()]
        self._counts = [
            (m._update_count, {n: len(s) for n in m._defaults if isinstance(s := getattr(m, n), list)})
            for m in self._metrics
        ]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Undo changes of metrics and lists in a pass of another stage than the last."""
        put_back = [_state_of(metric) for metric in self._metrics]
        lists = [_Note.of(value) for _, _, value in self._places() if isinstance(value, list | dict)]
        try:
            yield
        finally:
            for each in put_back:
                each()
            for note in lists:
                note.put_back()

    def found(self) -> list[Any]:
        """On the last stage's rank, return the changes since :meth:`begin`."""
        known = {(id(namespace), key): note for namespace, key, note in self._notes}
        fixed = {(id(namespace), key): i for i, (namespace, key) in enumerate(self._fixed)}
        changes: list[Any] = []
        for namespace, key, value in self._places():
            change = known.get((id(namespace), key), _NEW).change(value)
            if change is not None:
                changes.append((fixed.get((id(namespace), key)), key, change))
        self._notes = []
        for collection in self._collections:
            collection.items(copy_state=False)  # metrics that share a state get the leader's
        metrics: list[Any] = []
        for i, (metric, (count, lengths)) in enumerate(zip(self._metrics, self._counts, strict=True)):
            if metric._update_count == count:
                continue
            states: dict[str, Any] = {}
            for name in metric._defaults:
                state = getattr(metric, name)
                start = lengths.get(name, 0) if isinstance(state, list) and metric._update_count > count else None
                states[name] = state if start is None or start > len(state) else (start, state[start:])
            metrics.append((i, states, {n: metric.__dict__[n] for n in _METRIC if n in metric.__dict__}))
        return [changes, metrics] if changes or metrics else []

    def share(self, found: list[Any]) -> None:
        """Send the last stage's changes to all ranks, if there are any; collective."""
        ground, source = self._ground, self._ground.layout.last_rank
        try:
            changes, metrics = broadcast(found, source, ground.group, ground.device)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            names = [key for _, key, _ in found[0]] if found else []
            raise ValueError(
                f"{ground.who}: training_step puts values into {names[:5]} that cannot be sent to other ranks ({error})."
                " Keep tensors and plain Python values there, or use pipeline_parallel_size=1."
            ) from error
        if dist.get_rank(ground.group) == source:
            return
        for fixed, key, change in changes:
            namespace = ground.module.__dict__ if fixed is None else self._fixed[fixed][0]
            namespace[key] = _changed(namespace.get(key), change)
        for i, states, rest in metrics:
            metric = self._metrics[i]
            for name, state in states.items():
                if isinstance(state, tuple):
                    start, more = state
                    state = [*getattr(metric, name)[:start], *more]
                setattr(metric, name, state)
            cast("dict[str, Any]", metric.__dict__).update(rest)


def _plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, _VALUES) for item in cast("tuple[Any, ...]", value))


def _state_of(metric: Metric) -> Callable[[], None]:
    """Return a function that restores a metric's present state."""
    states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    rest = {n: metric.__dict__[n] for n in _METRIC if n in metric.__dict__}

    def put_back() -> None:
        for name, value in states.items():
            setattr(metric, name, value)
        cast("dict[str, Any]", metric.__dict__).update(rest)

    return put_back


def _copied(state: Any) -> Any:
    return state.detach().clone() if isinstance(state, Tensor) else list(state)
