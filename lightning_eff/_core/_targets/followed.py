"""Observe the torch calls on followed tensors alone.

A ``TorchFunctionMode`` intercepts every torch call of a step, about 200 in a small one, to see the few on labels. So followed
tensors change their class to :class:`Followed` for as long as they are followed. Torch shows the class its own calls, and all
other calls run as they do without techniques.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

_ACTIVE: "list[Observer]" = []
_OUTER: "ContextVar[tuple[Observer, ...] | None]" = ContextVar("outer", default=None)  # those that see a nested call
_HOLDERS: dict[int, int] = {}  # by id, how many observers follow a tensor
#: Calls whose result depends on the tensor's class.
_OF_CLASS = frozenset((Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__repr__, Tensor.__format__))


class Observer(Protocol):
    """Sees the calls on followed tensors."""

    over: bool

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the call."""
        ...


class Followed(Tensor):
    """The class of a tensor while it is followed. Innermost observers see its calls first, as with modes."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _OF_CLASS:
            with _as_plain((args, kwargs)):
                return func(*args, **kwargs)
        outer = _OUTER.get()
        observers = [o for o in (_ACTIVE if outer is None else outer) if not o.over]
        act = observers.pop().on_call if observers else _call
        token = _OUTER.set(tuple(observers))
        try:
            if observers:
                return act(func, args, kwargs)
            if any(foreign(t) for t in types):  # whose own handling must stay enabled
                with _as_plain((args, kwargs)):
                    return act(func, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return act(func, args, kwargs)
        finally:
            _OUTER.reset(token)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def foreign(cls: type) -> bool:
    """Return whether torch shows calls on tensors of this class to the class itself, apart from ours."""
    return (
        cls is not Followed
        and cls.__torch_function__ is not torch._C._disabled_torch_function_impl
        and cls is not Tensor
    )


def can_follow(tensors: Iterable[Tensor]) -> bool:
    """Return whether these tensors can be observed by their class.

    Modes that are entered already would see their calls first, and compiled code would see another class.
    """
    if torch._C._len_torch_function_stack() or any(type(t) not in (Tensor, Followed) for t in tensors):
        return False
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is None or not dynamo.counters["frames"]


def enter(observer: Observer) -> None:
    """Show calls on followed tensors to ``observer`` until :func:`leave`."""
    _ACTIVE.append(observer)


def leave(observer: Observer) -> None:
    """Stop showing calls to ``observer``."""
    _ACTIVE.remove(observer)


def hold(tensor: Tensor) -> bool:
    """Follow ``tensor`` by its class, and return whether :func:`release` must follow."""
    if type(tensor) not in (Tensor, Followed):
        return False
    tensor.__class__ = Followed
    _HOLDERS[id(tensor)] = _HOLDERS.get(id(tensor), 0) + 1
    return True


def release(tensor: Tensor) -> None:
    """Give ``tensor`` its own class back, unless others follow it."""
    count = _HOLDERS.pop(id(tensor)) - 1
    if count:
        _HOLDERS[id(tensor)] = count
    else:
        tensor.__class__ = Tensor


@contextmanager
def _as_plain(values: Any) -> Iterator[None]:
    found = list(_followed(values))
    for tensor in found:
        tensor.__class__ = Tensor
    try:
        yield
    finally:
        for tensor in found:
            tensor.__class__ = Followed


def _followed(value: Any) -> Iterator[Tensor]:
    if type(value) is Followed:
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _followed(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _followed(item)
