"""Copies of a layer that peft has made, for equal linear layers.

Peft takes several times as long to make a layer as a copy takes, and a module may have thousands of linear layers.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core._architecture.stand_ins import keep_class

L = TypeVar("L", bound=nn.Module)
_SIMPLE = (bool, int, float, str, type(None))
_CONTAINERS = frozenset((dict, OrderedDict, set, list))
_OWN = frozenset((*vars(nn.Linear(1, 1, device="meta")), "nf", "nx"))  # Hugging Face's Conv1D has the last two


class Copies(Generic[L]):
    """Makes layers around plain linear layers, with the values that ``make`` would give them.

    The first layer of each kind and a copy of it are made from the same random numbers. If the copy differs, all layers of
    this kind are made by ``make``.

    Args:
        make: puts one of peft's layers around a linear layer.
        draw: gives a copy its initial values, with the random numbers that ``make`` draws.
    """

    def __init__(self, make: Callable[..., L], draw: Callable[[Any], None]) -> None:
        self._make, self._draw = make, draw
        self._first: dict[Any, L | None] = {}

    def __call__(self, base: nn.Module, **how: bool) -> L:
        """A layer around ``base``; ``how`` are further arguments of ``make``."""
        kind = _kind(base, how)
        if kind is None:
            return self._make(base, **how)
        if kind not in self._first:
            self._first[kind] = self._checked(base, how)
        first = self._first[kind]
        return self._make(base, **how) if first is None else self._copied(first, base)

    def _copied(self, first: L, base: nn.Module) -> L:
        new = _like(first, first.get_submodule("base_layer"), base)
        self._draw(new)
        return new

    def _checked(self, base: nn.Module, how: dict[str, bool]) -> L | None:
        """A layer whose copies equal what ``make`` gives; None if it cannot be copied."""
        with rng.fork():
            rng.set_keyed(0)
            first = self._make(base, **how)
            after = torch.get_rng_state()
            if not all(_copyable(m) for m in first.modules() if m is not base):
                return None
            keep_class(first, base)  # which takes as long as a copy
            rng.set_keyed(0)
            copy = self._copied(first, base)
            alike = torch.equal(after, torch.get_rng_state())
        ours, theirs = copy.state_dict(keep_vars=True), first.state_dict(keep_vars=True)
        alike = alike and ours.keys() == theirs.keys() and all(_same(t, theirs[name]) for name, t in ours.items())
        return first if alike else None


def _kind(base: nn.Module, how: dict[str, bool]) -> Any:
    """The attributes of ``base`` that decide how a layer around it is made; None if other attributes may matter."""
    weight = base._parameters.get("weight")
    if weight is None or type(weight) is not nn.Parameter or base._modules or not base.__dict__.keys() <= _OWN:
        return None
    bias = base._parameters.get("bias")
    here = torch.get_default_dtype(), torch.get_default_device()
    return type(base), weight.shape, weight.dtype, weight.device, bias is None, here, tuple(how.items())


def _copyable(m: nn.Module) -> bool:
    """Whether copies of the attributes of ``m``, one level deep, are independent of it."""
    if (
        "__deepcopy__" in m.__dict__
        or hasattr(type(m), "__deepcopy__")
        or any(b is not None for b in m._buffers.values())
    ):
        return False
    for name, value in m.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules") or isinstance(value, (*_SIMPLE, torch.dtype)):
            continue
        if type(value) not in _CONTAINERS and not isinstance(value, tuple):
            return False
        items = value.values() if isinstance(value, dict) else value
        if not all(isinstance(item, _SIMPLE) for item in items):
            return False
    return True


def _like(m: Any, base: nn.Module, new_base: nn.Module) -> Any:
    """A copy of a module with uninitialised parameters and ``new_base`` in place of ``base``."""
    cls: Any = type(m)
    new = cls.__new__(cls)
    state = new.__dict__
    for name, value in m.__dict__.items():
        state[name] = value.copy() if type(value) in _CONTAINERS else value
    parameters, children = state["_parameters"], state["_modules"]
    for name, p in parameters.items():
        if p is not None:
            parameters[name] = nn.Parameter(torch.empty_like(p), p.requires_grad)
    for name, child in children.items():
        children[name] = new_base if child is base else _like(child, base, new_base)
    return new


def _same(a: Tensor, b: Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.requires_grad == b.requires_grad
    return alike and (a.is_meta or torch.equal(a, b))
