"""``lightning_eff.export``: restore the plain architecture where a technique's replacements can be folded."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff._core._architecture import unfinished
from lightning_eff._core._architecture.record import APPLIED, FROZEN, SHARED, Swap, swap_of, tensors_of
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core.session import is_open

M = TypeVar("M", bound=nn.Module)


class CannotFold(ValueError):
    """A replacement has no equivalent in the plain architecture. Its ``fold`` raises this with the reason."""


@runtime_checkable
class Foldable(Protocol):
    """A replacement that can be folded into the original module."""

    def fold(self) -> Mapping[str, Tensor]:
        """Return the original's parameters and buffers by name, with which it computes the same, up to rounding.

        Unchanged tensors are returned themselves. No tensor is changed in place.

        Raises:
            CannotFold: if there are none, with the reason.
        """
        ...


def export(module: M) -> M:
    """Return a copy of ``module`` with the plain module's architecture: its names, its shapes, and its outputs up to rounding.

    Replacements of architecture techniques are folded, and parameters that they froze take gradients again. ``module`` does
    not change, and can be trained further. A module without changes is copied.

    Args:
        module: a trained module, or one from ``lightning_eff.apply`` with a checkpoint loaded, or a part of either.

    Raises:
        TypeError: if it is not a module.
        ValueError: if something cannot be folded, with the reason. Also if its weights are sharded or on the meta device, if
            its growth is unfinished, so that the plain module differs from the trained one, or during a run.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"lightning_eff.export: got {type(module).__name__}; expected an nn.Module.")
    _check(module)
    # in a container, because the root may be a replacement too, as a part of a larger module
    holder = nn.Sequential(copy.deepcopy(module))
    standing = {path: swap for path, _, _, m in _places(holder) if (swap := swap_of(m)) and not isinstance(m, Foldable)}
    if standing:
        raise ValueError(f"lightning_eff.export: {type(module).__name__} cannot be made plain. {_reasons(standing)}")
    for m in holder.modules():
        for name in m.__dict__.pop(SHARED, ()):
            p = cast(nn.Parameter, m._parameters[name])
            m._parameters[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
    _fold(holder, who=type(module).__name__)
    for m in holder.modules():
        m.__dict__.pop(APPLIED, None)
        for name in m.__dict__.pop(FROZEN, ()):
            cast(nn.Parameter, m._parameters[name]).requires_grad_(True)
    return cast(M, holder[0])


def _check(module: nn.Module) -> None:
    who = f"lightning_eff.export: {type(module).__name__}"
    note = unfinished.note_of(module)
    if note is not None:
        raise ValueError(
            f"lightning_eff.export: {note}. Train on until all of them run, or train with finish='identity', which"
            " gives a correct plain module."
        )
    if any(is_a(m, LightningModule) and m._trainer is not None and is_open(m._trainer) for m in module.modules()):
        raise ValueError(
            f"{who} is being trained. Call export after the fit, or load a checkpoint of the run into"
            " lightning_eff.apply(plain, technique, ...)."
        )
    for name, tensor in tensors_of(module).items():
        lies = "sharded (a DTensor)" if isinstance(tensor, DTensor) else "on the meta device" if tensor.is_meta else ""
        if lies:
            raise ValueError(
                f"{who}: {name} is {lies}; expected whole weights. Load a checkpoint of the run into"
                " lightning_eff.apply(plain, technique, ...), and export that."
            )


def _places(holder: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield the path in the exported module, parent, name and child of each place in the tree, innermost first."""
    for path, parent in reversed(list(holder.named_modules(remove_duplicate=False))):
        for name, child in list(parent._modules.items()):
            if child is not None:
                yield (f"{path}.{name}" if path else name).partition(".")[2], parent, name, child


def _fold(holder: nn.Module, *, who: str, below: str = "") -> None:
    """Fold every replacement once, innermost first."""
    folded: dict[int, nn.Module] = {}
    kept: list[nn.Module] = []  # so that no id is reused
    for path, parent, name, child in _places(holder):
        where = ".".join(filter(None, (below, path)))
        while (swap := swap_of(child)) is not None:
            if id(child) not in folded:
                kept.append(child)
                plain = folded[id(child)] = _folded(holder, where, child, swap, who=who)
                if any(swap_of(m) for m in plain.modules() if m is not plain):  # changed by an earlier technique
                    _fold(nn.Sequential(plain), who=who, below=where)
            child = folded[id(child)]
        parent._modules[name] = child


def _folded(holder: nn.Module, path: str, child: nn.Module, swap: Swap, *, who: str) -> nn.Module:
    had = tensors_of(child)
    versions = {name: t._version for name, t in had.items()}
    try:
        with torch.no_grad():
            tensors = dict(cast(Foldable, child).fold())
    except CannotFold as e:
        raise ValueError(
            f"lightning_eff.export: {who} cannot be made plain. {swap.by} put {type(child).__name__} in the place of"
            f" {path}: {e}"
        ) from e
    if any(t._version != versions[name] for name, t in had.items()):
        raise TypeError(f"{type(child).__name__}.fold changed its own tensors in place. Return new tensors instead.")
    shapes = {name: list(t.shape) for name, t in tensors.items()}
    expected = {name: shape for name, (shape, _) in swap.tensors.items()}
    if shapes != expected:
        raise TypeError(
            f"{type(child).__name__}.fold returned {shapes} at {path}; expected the tensors of {type(swap.was).__name__}:"
            f" {expected}."
        )
    _keep_ties(holder, path, child, tensors, who=who, by=swap.by)
    return swap.put_back(tensors).train(child.training)


def _keep_ties(
    holder: nn.Module, path: str, child: nn.Module, tensors: dict[str, Tensor], *, who: str, by: str
) -> None:
    """Keep tensors that other modules use too tied; raise ``ValueError`` if folding changed one."""
    inside = {id(m) for m in child.modules()}
    others = {
        id(t): where.partition(".")[2] for where, m in holder.named_modules() if id(m) not in inside for t in _own(m)
    }
    left = {id(t) for t in tensors.values()}
    for name, t in tensors_of(child).items():
        if id(t) not in others or id(t) in left:
            continue
        if name in tensors and _equal(t, tensors[name]):
            tensors[name] = t
            continue
        raise ValueError(
            f"lightning_eff.export: {who} cannot be made plain. What {by} learnt at {path} folds into its {name}, but"
            f" {others[id(t)] or 'another module'} uses this tensor too. Leave {path} out of"
            f" {by}, or untie the two before training."
        )


def _own(m: nn.Module) -> Iterable[Tensor]:
    return [*m.parameters(recurse=False), *m.buffers(recurse=False)]


def _equal(a: Tensor, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


def _reasons(standing: dict[str, Swap]) -> str:
    """Return one sentence for each technique that does not fold, with the places."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for path, swap in standing.items():
        found.setdefault((swap.by, type(swap.was).__name__, swap.stays), []).append(path or "the module")
    return " ".join(
        f"{by} replaced {was} at {', '.join(sorted(paths)[:8])}{' and others' * (len(paths) > 8)}:"
        f" {stays or 'the replacement has no method fold'}. Keep the module as it is, and build it by"
        " lightning_eff.apply(plain, technique, ...) where its checkpoints are used."
        for (by, was, stays), paths in found.items()
    )
