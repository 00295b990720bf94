"""Buffers at averaged weights: running statistics are averaged, and some buffers are computed from the weights.

A mean has no meaning for a count, a mask, a table of codes, a quantizer's scale or a unit vector. So only running statistics
are averaged. Buffers that a parametrization computes from weights, such as spectral normalization's vectors, are computed at
the averaged weights. All others keep their values from training.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_STATISTICS = ("running_mean", "running_var")
_TURNS = 100  # power iterations at most


def is_statistic(name: str) -> bool:
    """Whether the buffer of this dotted name holds running statistics, of BatchNorm or of a layer that is built like it."""
    return name.rpartition(".")[2] in _STATISTICS


def computed(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The floating buffers of parametrisations, by the path of the module that computes them.

    These are parametrisations of ``torch.nn.utils.parametrize``, and hooks such as ``torch.nn.utils.spectral_norm`` puts
    before a forward pass.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(owner, parametrize.ParametrizationList):
            names = [name for name, b in owner.named_buffers() if b.is_floating_point()]
        elif _hooks(owner):
            names = [name for name, b in owner.named_buffers(recurse=False) if b.is_floating_point()]
        else:
            continue
        if names:
            found[path] = tuple(prefix + name for name in names)
    return found


@torch.no_grad()
def compute(module: nn.Module, where: dict[str, tuple[str, ...]]) -> None:
    """Compute the buffers from :func:`computed` at the present weights.

    Their modules compute them as in training, one power iteration at a time, until they converge. Buffers that do not
    converge keep their values.
    """
    buffers = dict(module.named_buffers())
    for path, names in where.items():
        owner = module.get_submodule(path)
        held = [buffers[name] for name in names]
        first = [b.clone() for b in held]
        moved = 0.0
        with torch.random.fork_rng(devices=[]), _mode(owner, training=True):
            for _ in range(_TURNS):
                before = [b.clone() for b in held]
                for run in _computations(owner):
                    run()
                moved = max(
                    float((b - a).norm() / a.norm().clamp_min(1e-12)) for a, b in zip(before, held, strict=True)
                )
                if moved < 1e-6:
                    break
        if not moved < 0.1:
            for b, kept in zip(held, first, strict=True):
                b.copy_(kept)
        with _mode(owner, training=False):
            for hook in _hooks(owner):  # its weight is not a parameter, and is computed before a forward pass
                hook(owner, None)


def _hooks(owner: nn.Module) -> list[Any]:
    """The hooks before its forward pass that compute a weight."""
    return [hook for hook in owner._forward_pre_hooks.values() if hasattr(hook, "compute_weight")]


def _computations(owner: nn.Module) -> Iterator[Callable[[], Any]]:
    if isinstance(owner, parametrize.ParametrizationList):
        yield owner
    else:
        for hook in _hooks(owner):
            yield partial(hook, owner, None)


class _mode:
    """Sets the mode of a module and its submodules in a context."""

    def __init__(self, owner: nn.Module, training: bool) -> None:
        self._training = training
        self._modes = [(m, m.training) for m in owner.modules()]

    def __enter__(self) -> None:
        for m, _ in self._modes:
            m.training = self._training

    def __exit__(self, *_: object) -> None:
        for m, training in self._modes:
            m.training = training


def values_of(module: nn.Module, where: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Copies of these buffers, by name."""
    buffers = dict(module.named_buffers())
    return {name: buffers[name].clone() for names in where.values() for name in names}
