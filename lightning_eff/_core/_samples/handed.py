"""The batch that the user's step receives: the same in every pass, even if the step changes it."""

import functools
import inspect
from collections.abc import Callable, Iterator
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

_DEEP = 4
_SMALL = 64  # containers with more items are not searched for nested containers
_unseen = torch._C.DisableTorchFunction  # techniques look at calls on labels
_version = attrgetter("_version")

Content = list[tuple[Any, Any]]


class Handed:
    """Undoes what the user's step does to its batch, such as ``batch.pop("labels")`` or ``x.sub_(mean)``, after each pass.

    Other passes on the batch, and techniques that read it, then find what the loader returned. :meth:`settle` applies the
    last pass's changes to containers again, so that the user's hooks see the batch that the step left behind. The first pass
    shows whether the step changes tensors in place. If so, each pass gets copies of them.

    Args:
        who: names the module in an error.
    """

    def __init__(self, who: str) -> None:
        self.who = who
        self._copies: bool | None = None
        self._left: tuple[Any, Content] | None = None
        self._changed: list[tuple[Tensor, Tensor | None]] = []  # of this step, with what they were if that is known

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a ``training_step``."""

        @functools.wraps(step)
        def own(batch: Any, *rest: Any, **kwargs: Any) -> Any:
            items = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else (batch,)
            values = [*items]
            kinds = {*map(type, values)}
            # most batches hold nothing but tensors, and are looked at without a call for each
            with _unseen():
                plain = self._copies is False and not self._changed and kinds == {Tensor}
                versions = [*map(_version, values)] if plain and not any(map(Tensor.is_inference, values)) else None
            if versions is None:
                return self._any(step, batch, rest, kwargs)
            had, self._left = [*batch] if type(batch) is dict else None, None
            try:
                return step(batch, *rest, **kwargs)
            finally:
                with _unseen():
                    if [*map(_version, values)] != versions:
                        self._note([*zip(values, versions, strict=True)], None)
                left = [*batch.values()] if type(batch) is dict else [*batch] if type(batch) is list else values
                if len(left) != len(values) or any(map(is_not, left, values)) or (had and had != [*batch]):
                    before = values if had is None else dict(zip(had, values, strict=True))
                    self._left = batch, contents(batch)
                    put_back([(batch, before)])

        own.__wrapped__ = inspect.unwrap(step)  # Lightning unwraps only once
        return own

    def _any(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step on a batch of any kind."""
        had = contents(batch)
        given = _fresh(batch, self._copied(batch), _DEEP) if self._copies or self._changed else batch
        with _unseen():
            seen = [] if self._copies else [(t, t._version) for t in _tensors(given, _DEEP) if not t.is_inference()]
            first = [t.detach().clone() for t, _ in seen] if self._copies is None else None
        self._left = None
        try:
            return step(given, *rest, **kwargs)
        finally:
            with _unseen():
                self._note(seen, first)
            if any(_differs(container, items) for container, items in had):
                self._left = batch, contents(batch)
                put_back(had)

    def settle(self, batch: Any) -> None:
        """End a step: change the containers of ``batch`` as the last pass did, if that pass had this batch."""
        left, self._left = self._left, None
        self._changed = []
        if left is not None and left[0] is batch:
            put_back(left[1])

    def _note(self, seen: list[tuple[Tensor, int]], first: list[Tensor] | None) -> None:
        """Look whether the step changed tensors in place. ``first`` holds their values before the first pass."""
        changed = [i for i, (t, version) in enumerate(seen) if t._version != version]
        if first is not None:
            self._copies = False
        if not changed:
            return
        self._copies = True
        for i in changed:
            tensor, was = seen[i][0], None if first is None else first[i]
            if was is not None and not torch.is_grad_enabled():
                tensor.data.copy_(was)  # no backward pass follows that needs the changed values
            else:
                self._changed.append((tensor, was))

    def _copied(self, batch: Any) -> Callable[[Tensor], Tensor]:
        """Return a function that copies a tensor as it was before the step's first pass changed it."""

        def copied(tensor: Tensor) -> Tensor:
            for changed, was in self._changed:
                if changed is tensor:
                    if was is None:
                        raise ValueError(
                            f"{self.who}.training_step changed its batch in place, but did not in the run's first step. A"
                            " technique that runs it again on the batch would train on other data. Change a copy, such as"
                            " x = x.clone()."
                        )
                    return was.clone()
            return tensor.clone()

        return copied


def contents(batch: Any) -> Content:
    """Return the containers in ``batch`` that can change, each with its items: dicts, lists, and attributes of objects."""
    return [(value, value.copy()) for value in _containers(batch, _DEEP) if not isinstance(value, tuple)]


def put_back(content: Content) -> None:
    """Give containers the items that they had."""
    for container, items in content:
        if not _differs(container, items):
            continue
        if isinstance(container, dict):
            container.clear()
            container.update(items)
        else:
            container[:] = items


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that holds data; None for a tensor, a module, code or an immutable value."""
    if isinstance(value, Tensor | nn.Module | type) or callable(value):
        return None
    return getattr(value, "__dict__", None)


def _containers(value: Any, deep: int) -> Iterator[dict[Any, Any] | list[Any] | tuple[Any, ...]]:
    if not isinstance(value, dict | list | tuple):
        value = _attributes(value)
    if value is None:
        return
    yield value
    if deep and len(value) <= _SMALL:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item, deep - 1)


def _tensors(batch: Any, deep: int) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    for container in _containers(batch, deep):
        yield from (
            item
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, Tensor)
        )


def _fresh(value: Any, copied: Callable[[Tensor], Tensor], deep: int) -> Any:
    """Return ``value`` with copies of its tensors, in the same containers; tuples are made again."""
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, tuple):
        items = [_fresh(item, copied, deep - 1) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    held = value if isinstance(value, dict | list) else _attributes(value)
    if held is None or deep < 0:
        return value
    if len(held) > _SMALL:
        deep = 0
    pairs = held.items() if isinstance(held, dict) else enumerate(held)
    for key, item in [(key, _fresh(item, copied, deep - 1)) for key, item in pairs]:
        held[key] = item  # pyright: ignore[reportArgumentType, reportCallIssue]
    return value


def _differs(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return True
    if isinstance(container, dict):
        return any(a is not b or container[a] is not items[b] for a, b in zip(container, items, strict=True))
    return any(a is not b for a, b in zip(container, items, strict=True))
