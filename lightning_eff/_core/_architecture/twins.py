"""Frozen copies of a network in the same module, such as an EMA or target network, which are changed with it.

Code that updates such a copy pairs its parameters with those of the network, by order or by name. So the copy gets the
same new parameters. Techniques do not see the copy while they change the network, because they would try to train it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_eff._core._architecture.record import FROZEN, swap_of, tensors_of
from lightning_eff._core._stack.walking import modules_by_path, parameters_of

_Key = tuple[type[nn.Module], tuple[tuple[str, torch.Size, torch.dtype], ...]]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass
class Twin:
    """A network, and a frozen copy of it with the same values.

    Attributes:
        path: the network's path.
        at: the copy's path.
        network: the network, which trains.
        parent: the copy's parent.
        name: the copy's name in its parent.
        twin: the copy.
    """

    path: str
    at: str
    network: nn.Module
    parent: nn.Module
    name: str
    twin: nn.Module
    _pairs: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    _children: list[dict[str, nn.Module | None]] = field(default_factory=list)
    _hooks: list[set[int]] = field(default_factory=list)
    _memo: dict[int, Any] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # objects whose ids are in the memo
    _undo: list[Any] = field(default_factory=list)

    def note(self, root: nn.Module) -> None:
        """Record the network's structure before it is changed."""
        self._pairs = [(m, self.twin.get_submodule(path)) for path, m in self.network.named_modules()]
        self._children = [dict(m._modules) for m, _ in self._pairs]
        self._hooks = [_hooks_of(m) for m, _ in self._pairs]
        same = [*root.modules(), *root.parameters(), *root.buffers()]  # objects used elsewhere are not copied
        ours, theirs = tensors_of(self.network), tensors_of(self.twin)
        matched = [*self._pairs, *((t, theirs[name]) for name, t in ours.items())]
        self._kept = [same, matched]
        self._memo = {**{id(one): one for one in same}, **{id(one): other for one, other in matched}}

    @torch.no_grad()
    def follow(self) -> bool:
        """Change the copy as the network has changed since :meth:`note`; return whether it had."""
        for (m, other), children in zip(self._pairs, self._children, strict=True):
            for name, child in m._modules.items():
                if child is None or child is children.get(name):
                    continue
                self._undo.append((other._modules, name, other._modules.get(name)))
                other._modules[name] = self._copied(child, other.training)
        for (m, other), had in zip(self._pairs, self._hooks, strict=True):
            self._hook(m, other, had)
        changed = bool(self._undo)
        for name, p in self.network.named_parameters(remove_duplicate=False):
            q = self.twin.get_parameter(name)
            if q.shape == p.shape and not torch.equal(p, q):  # an initialization that comes with the change
                self._undo.append((q, q.detach().clone()))
                q.copy_(p)
        return changed

    def undo(self) -> None:
        """Undo the changes of the copy."""
        while self._undo:
            match self._undo.pop():
                case (dict() as space, key, old):
                    if old is None:
                        space.pop(key, None)
                    else:
                        space[key] = old
                case (parameter, value):
                    parameter.data.copy_(value)

    def _copied(self, m: nn.Module, training: bool) -> nn.Module:
        new = copy.deepcopy(m, self._memo)
        new.requires_grad_(False).train(training)
        for part in new.modules():
            part.__dict__.pop(FROZEN, None)  # it was frozen before, and export must keep it so
            swap = swap_of(part)
            if swap is not None:
                swap.tensors = {name: (shape, False) for name, (shape, _) in swap.tensors.items()}
        return new

    def _hook(self, m: nn.Module, other: nn.Module, had: set[int]) -> None:
        for kind in _HOOKS:
            for at, hook in getattr(m, kind).items():
                if at not in had:
                    self._undo.append((getattr(other, kind), at, None))
                    getattr(other, kind)[at] = copy.deepcopy(hook, self._memo)
                    flags = getattr(m, f"{kind}_with_kwargs")
                    if at in flags:
                        self._undo.append((getattr(other, f"{kind}_with_kwargs"), at, None))
                        getattr(other, f"{kind}_with_kwargs")[at] = flags[at]


def find_twins(root: nn.Module) -> list[Twin]:
    """Return the frozen copies in ``root`` of networks that train: same class, parameters, buffers and values."""
    if len({p.requires_grad for p in parameters_of(root)}) < 2:
        return []
    networks: dict[_Key, list[tuple[str, nn.Module]]] = {}
    for path, m in modules_by_path(root):
        key = _key(m)
        if path and key is not None and any(p.requires_grad for p in m.parameters()):
            networks.setdefault(key, []).append((path, m))
    found: list[Twin] = []
    for at, m in modules_by_path(root):
        if (
            not at
            or any(at.startswith(f"{twin.at}.") for twin in found)
            or any(p.requires_grad for p in m.parameters())
        ):
            continue
        parent, _, name = at.rpartition(".")
        holder = root.get_submodule(parent)
        if isinstance(holder, nn.Sequential | nn.ModuleList | nn.ModuleDict):  # they could not hide it
            continue
        key = _key(m)
        for path, network in () if key is None else networks.get(key, ()):
            if _same(network, m) and not f"{at}.".startswith(f"{path}."):
                found.append(Twin(path, at, network, holder, name, m))
                break
    return found


@contextmanager
def hidden(twins: list[Twin]) -> Iterator[None]:
    """Hide the copies from code that walks the module tree, but not from code that uses them by attribute."""
    held = [(twin.parent, dict(twin.parent._modules)) for twin in twins]
    for twin in twins:
        del twin.parent._modules[twin.name]
        twin.parent.__dict__[twin.name] = twin.twin
    try:
        yield
    finally:
        for twin in twins:
            twin.parent.__dict__.pop(twin.name, None)
            twin.parent._modules[twin.name] = twin.twin
        for parent, children in held:  # restore the order
            now = dict(parent._modules)
            parent._modules.clear()
            parent._modules.update({key: now[key] for key in children if key in now})
            parent._modules.update({key: child for key, child in now.items() if key not in children})


def log_changes(twins: list[Twin], who: str) -> None:
    """Log which copies were changed."""
    for twin in twins:
        rank_zero_info(
            f"{who}: {twin.at} is a frozen copy of {twin.path}, so it gets the same new parameters, frozen. To leave the copy"
            f" unchanged, remove {who} from the callbacks and call lightning_eff.apply(self.{twin.path}, ...) in __init__,"
            " after the copy is created."
        )


def _key(m: nn.Module) -> _Key | None:
    tensors = tensors_of(m)
    if not any(isinstance(t, nn.Parameter) for t in tensors.values()) or any(
        is_lazy(t) or isinstance(t, DTensor) or t.is_meta for t in tensors.values()
    ):
        return None
    return type(m), tuple((name, t.shape, t.dtype) for name, t in tensors.items())


def _same(network: nn.Module, twin: nn.Module) -> bool:
    """Return whether the values are equal and not constant: those of two fresh norms are always equal."""
    ours, theirs = tensors_of(network), tensors_of(twin)
    if any(a is theirs[name] and isinstance(a, nn.Parameter) for name, a in ours.items()):
        return False
    told = False
    for name, a in ours.items():
        if a.device != theirs[name].device or not torch.equal(a, theirs[name]):
            return False
        told |= isinstance(a, nn.Parameter) and _varies(a)
    return told


def _varies(t: Tensor) -> bool:
    return t.numel() > 1 and bool((t != t.flatten()[0]).any())


def _hooks_of(m: nn.Module) -> set[int]:
    return {at for kind in _HOOKS for at in getattr(m, kind)}
