"""Save the attributes of custom samplers: generators, orders and counters that persist from epoch to epoch."""

import copy
import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

_PLAIN = (int, float, bool, str, type(None))
_HASHED_ARRAYS = "iufb"


class Held:
    """The attributes of these objects that change while they are iterated.

    Args:
        owners: the samplers. Only changed attributes are saved, and generators always.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._owners = [owner for owner in owners if hasattr(owner, "__dict__")]
        self._fresh = [{name: _digest(value) for name, value in vars(owner).items()} for owner in self._owners]

    def saved(self) -> list[dict[str, Any]]:
        """Return the current values, in plain containers and tensors."""
        return [self._of(owner, fresh) for owner, fresh in zip(self._owners, self._fresh, strict=True)]

    def set(self, values: Iterable[dict[str, Any]]) -> None:
        """Restore the values of :meth:`saved`."""
        for owner, held in zip(self._owners, values, strict=False):
            for name, value in held.items():
                _put(owner, name, value)

    @staticmethod
    def _of(owner: Any, fresh: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in vars(owner).items():
            kind = _kind(value)
            if kind and (kind in _GENERATORS or fresh.get(name) != _digest(value)):
                found[name] = {kind: _TAKEN[kind](value)}
        return found


def _is_plain(value: Any, depth: int = 3) -> bool:
    if type(value) in (list, tuple):
        return depth > 0 and all(_is_plain(part, depth - 1) for part in value)
    return type(value) in _PLAIN


def _kind(value: Any) -> str:
    """Return the kind under which ``value`` is saved, or "" if it is not."""
    if isinstance(value, np.random.Generator):
        return "numpy"
    if isinstance(value, np.random.RandomState):
        return "legacy"
    if isinstance(value, random.Random):
        return "python"
    if isinstance(value, torch.Generator):
        return "torch"
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind in _HASHED_ARRAYS else ""
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "plain" if _is_plain(value) else ""


def is_generator(value: Any) -> bool:
    """Return whether ``value`` is a random generator of torch, NumPy or Python."""
    return _kind(value) in _GENERATORS


def generator_state(value: Any) -> dict[str, Any]:
    """Return the state of a generator, in plain containers and tensors, for :func:`set_generator`."""
    kind = _kind(value)
    return {kind: _TAKEN[kind](value)}


def set_generator(value: Any, state: dict[str, Any]) -> None:
    """Restore the state of a generator, unless it belongs to a generator of another kind."""
    [(kind, numbers)] = state.items()
    if _kind(value) == kind:
        _put_generator(kind, value, numbers)


def _digest(value: Any) -> Any:
    """Return a digest that shows whether ``value`` has changed, without a copy of it."""
    kind = _kind(value)
    if kind == "plain":
        return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    if kind == "array":
        return value.shape, hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest()
    if kind == "tensor":
        return _digest(value.detach().cpu().numpy()) if value.dtype != torch.bfloat16 else value._version
    return None


def _plain_numbers(state: Any) -> Any:
    """Convert a bit generator's state, with 128-bit integers and arrays, to plain containers."""
    if isinstance(state, dict):
        return {key: _plain_numbers(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return [int(number) for number in state]
    return state.item() if isinstance(state, np.generic) else state


def _legacy(value: np.random.RandomState) -> dict[str, Any]:
    return _plain_numbers(value.get_state(legacy=False))


def _put_generator(kind: str, held: Any, value: Any) -> None:
    if kind == "torch":
        held.set_state(value)
    elif kind == "python":
        version, numbers, gauss = value
        held.setstate((version, tuple(numbers), gauss))
    elif kind == "legacy":
        held.set_state({**value, "state": {**value["state"], "key": np.array(value["state"]["key"], dtype=np.uint32)}})
    else:
        state = copy.deepcopy(value)
        numbers = state["state"]
        for name in [name for name, part in numbers.items() if isinstance(part, list)]:
            width = np.uint32 if state["bit_generator"] == "MT19937" else np.uint64
            numbers[name] = np.array(numbers[name], dtype=width)
        if isinstance(state.get("buffer"), list):
            state["buffer"] = np.array(state["buffer"], dtype=np.uint64)
        held.bit_generator.state = state


def _put(owner: Any, name: str, saved: dict[str, Any]) -> None:
    [(kind, value)] = saved.items()
    held = vars(owner).get(name)
    if kind in _GENERATORS:
        set_generator(held, saved)
    elif kind == "array":
        numbers = value.numpy()
        if isinstance(held, np.ndarray) and held.shape == numbers.shape and held.flags.writeable:
            held[...] = numbers  # in place, because others may hold it too
        else:
            vars(owner)[name] = numbers.copy()
    elif kind == "tensor":
        if isinstance(held, torch.Tensor) and held.shape == value.shape:
            held.detach().copy_(value)
        else:
            vars(owner)[name] = value.clone()
    else:
        vars(owner)[name] = copy.deepcopy(value)


_GENERATORS = ("numpy", "legacy", "python", "torch")
_TAKEN: dict[str, Any] = {
    "numpy": lambda value: _plain_numbers(value.bit_generator.state),
    "legacy": _legacy,
    "python": lambda value: [list(part) if isinstance(part, tuple) else part for part in value.getstate()],
    "torch": lambda value: value.get_state(),
    "array": lambda value: torch.from_numpy(np.array(value)),
    "tensor": lambda value: value.detach().clone(),
    "plain": copy.deepcopy,
}
