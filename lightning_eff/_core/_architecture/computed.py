"""Weights that a layer computes from others at each call: weight or spectral normalisation and other parametrizations.

Both forms are supported: ``torch.nn.utils.parametrize``, and the older one with forward hooks
(``torch.nn.utils.weight_norm``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from lightning_eff._core.steps import in_evaluation

_SETTLING = 30  # calls after which power iteration has found the norm of a new weight


@dataclass(frozen=True)
class Computed:
    """A weight with two or more dimensions that a layer computes.

    Attributes:
        path: the layer's path.
        layer: the layer.
        name: the weight's name in the layer.
        sources: the parameters from which it is computed, by name in the layer.
        hook: computes it in the older form; None in the newer.
    """

    path: str
    layer: nn.Module
    name: str
    sources: dict[str, nn.Parameter]
    hook: Any = None

    def value(self) -> Tensor:
        """Return the present weight, computed in evaluation mode so that no buffer changes."""
        with in_evaluation(self.layer.modules()):
            return self._compute()

    def carrier(self) -> str | None:
        """Return the name of the source whose zeros are the weight's zeros, or None.

        It is found by setting part of a source to zero for a moment. The test includes a whole row and a whole column of zeros,
        because weight normalisation divides by their norm. A single row or column is the whole weight, which is not tested.
        """
        for name, p in self.sources.items():
            if p.is_meta or isinstance(p, DTensor) or p.ndim < 2:
                continue
            before = p.detach().clone()
            parts = [(torch.arange(p.numel(), device=p.device).view(p.shape) % 3 > 0).to(p.dtype)]
            for dim in (dim for dim in range(2) if p.shape[dim] > 1):
                parts.append(
                    torch.ones_like(p).detach().index_fill_(dim, torch.zeros(1, dtype=torch.int64, device=p.device), 0)
                )
            try:
                if all(self._zeros_stay(p, before * part) for part in parts):
                    return name
            finally:
                p.data.copy_(before)
                self.value()
        return None

    def _zeros_stay(self, p: nn.Parameter, values: Tensor) -> bool:
        """Return whether ``values`` in ``p`` give a weight with the same zeros and no others."""
        p.data.copy_(values)
        made = self.value()
        return made.shape == p.shape and bool(torch.isfinite(made).all()) and bool(((made != 0) == (values != 0)).all())

    def set(self, value: Tensor) -> bool:
        """Set the sources so that the weight equals ``value``; return False, with nothing changed, if that is impossible."""
        tensors = [*self.sources.values(), *self.layer.buffers()]
        before = [t.detach().clone() for t in tensors]
        try:
            self._invert(value)
            made = self.value().detach()
            if bool(torch.isfinite(made).all()) and torch.allclose(made, value, rtol=1e-3, atol=1e-4):
                return True
        except (NotImplementedError, RuntimeError, ValueError):
            pass  # the parametrization has no inverse, or none for this value
        for t, old in zip(tensors, before, strict=True):
            t.data.copy_(old)
        self.value()
        return False

    @torch.no_grad()
    def _invert(self, value: Tensor) -> None:
        if self.hook is None:
            setattr(self.layer, self.name, value)
        elif isinstance(self.hook, WeightNorm):
            dims = [d for d in range(value.ndim) if d != self.hook.dim]
            norm = value.norm() if self.hook.dim == -1 else value.norm(dim=dims, keepdim=True)
            self.sources[f"{self.name}_g"].copy_(norm.view_as(self.sources[f"{self.name}_g"]))
            self.sources[f"{self.name}_v"].copy_(value)
        else:
            next(iter(self.sources.values())).copy_(value)
        modes = [(m, m.training) for m in self.layer.modules()]
        try:
            for m, _ in modes:
                m.training = True
            for _ in range(_SETTLING if any(True for _ in self.layer.buffers()) else 0):
                self._compute()
        finally:
            for m, mode in modes:
                m.training = mode

    def _compute(self) -> Tensor:
        if self.hook is not None:
            with torch.enable_grad():
                self.hook(self.layer, None)
        return cast(Tensor, getattr(self.layer, self.name))


def computed_weights(module: nn.Module) -> list[Computed]:
    """Return the weights that layers of ``module`` compute, each layer once."""
    found: list[Computed] = []
    for path, m in module.named_modules():
        if is_parametrized(m):
            for name, by in cast(Any, m.parametrizations).items():
                sources = {f"parametrizations.{name}.{key}": p for key, p in by.named_parameters(recurse=False)}
                found.append(Computed(path, m, name, sources))
        for hook in m._forward_pre_hooks.values():
            name = getattr(hook, "name", None)
            if isinstance(name, str) and name not in m._parameters and isinstance(m.__dict__.get(name), Tensor):
                own = {key: p for key, p in m._parameters.items() if p is not None and key.startswith(f"{name}_")}
                found.append(Computed(path, m, name, own, hook))
    return [one for one in found if one.sources and one.value().ndim > 1]


@contextmanager
def as_parameters(module: nn.Module) -> Iterator[list[str]]:
    """Make the weights that layers compute plain parameters under their own names, with their present values.

    On exit, the sources are set so that the layers compute the new values. The list then holds the names of weights that
    their layers cannot compute; these are unchanged.
    """
    left: list[str] = []
    every = [
        one
        for one in computed_weights(module)
        if not any(p.is_meta or isinstance(p, DTensor) for p in one.sources.values())
    ]
    restores: list[tuple[Computed, Tensor, nn.Parameter, Callable[[], None]]] = []
    try:
        for one in every:
            value = one.value().detach().clone()
            plain = nn.Parameter(value.clone(), requires_grad=any(p.requires_grad for p in one.sources.values()))
            restores.append((one, value, plain, _made_plain(one, plain)))
        yield left
    finally:
        for *_, restore in reversed(restores):
            restore()
    for one, value, plain, _ in restores:
        if not torch.equal(value, plain.detach()) and not one.set(plain.detach()):
            left.append(f"{one.path}.{one.name}".lstrip("."))


def _made_plain(one: Computed, plain: nn.Parameter) -> Callable[[], None]:
    """Put ``plain`` into the layer, and return a function that restores the layer."""
    m = one.layer
    cls, parameters, modules = type(m), dict(m._parameters), dict(m._modules)
    hooks, held = dict(m._forward_pre_hooks), m.__dict__.get(one.name)
    if one.hook is None:
        m._modules.pop("parametrizations", None)
        if is_parametrized_class(cls):
            m.__class__ = cls.__bases__[0]
    else:
        for key in [key for key, hook in hooks.items() if hook is one.hook]:
            del m._forward_pre_hooks[key]
        for key in one.sources:
            m._parameters.pop(key)
        m.__dict__.pop(one.name, None)
    m._parameters[one.name] = plain

    def restore() -> None:
        m.__class__ = cls
        m._parameters.clear()
        m._parameters.update(parameters)
        m._modules.clear()
        m._modules.update(modules)
        m._forward_pre_hooks.clear()
        m._forward_pre_hooks.update(hooks)
        if held is not None:
            m.__dict__[one.name] = held

    return restore


def is_parametrized_class(cls: type[nn.Module]) -> bool:
    """Return whether ``torch.nn.utils.parametrize`` created a class."""
    return cls.__name__.startswith("Parametrized") and len(cls.__bases__) == 1
