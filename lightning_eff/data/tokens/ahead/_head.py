"""The output layer with a transform for each further token, and the search for it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.linear_maps import linear_maps
from lightning_eff._core._architecture.record import tensors_of
from lightning_eff._core._branches.probing import Divided, probed
from lightning_eff.data.tokens._head.finding import Site, site_at

AHEAD = "ahead"


class Ahead(Derived):
    """A module with the output layer's weight (V, D), and W_k (D, D) for each further token, initially zero.

    Attributes:
        offsets: the offsets k that have a transform.
    """

    offsets: tuple[int, ...]

    @property
    def as_before(self) -> tuple[str, ...]:
        """All parameters: those of the layer mean the same, and the transforms are used by the loss."""
        return tuple(self._parameters)

    def fold(self) -> Mapping[str, Tensor]:
        """Return the layer's own parameters."""
        return {name: t for name, t in tensors_of(self).items() if name not in {f"{AHEAD}_{k}" for k in self.offsets}}


def with_transforms(plain: nn.Module, offsets: Sequence[int], width: int) -> Ahead:
    """Return ``plain`` with transforms for these offsets."""
    made = derived(Ahead, plain, offsets=tuple(offsets))
    for k in offsets:
        made.register_parameter(f"{AHEAD}_{k}", nn.Parameter(torch.zeros(width, width)))
    return made


def transformed(head: Ahead, k: int, h: Tensor) -> Tensor:
    """Return ``h + SiLU(W_k h)``, the hidden states (..., D) for the token at offset k; h if it has no transform."""
    if k not in head.offsets:
        return h
    return h + F.silu(F.linear(h, cast(Tensor, head._parameters[f"{AHEAD}_{k}"])))


def head_of(root: nn.Module, name: str | None, batch: Any, *, who: str) -> str:
    """Return the path of the output layer, or of the module that has its weight.

    Raises:
        ValueError: if it is not found, or ambiguous.
    """
    if name is not None:
        if not any(path == name and _weight(m) is not None for path, m in root.named_modules()):
            raise ValueError(
                f"{who}(head={name!r}): {type(root).__name__} has no module of this path with a weight (V, D). Name an"
                f" nn.Linear, or the nn.Embedding whose weight computes logits: {_likely(root)}."
            )
        return name
    try:
        names = probed(root, who=who, batch=batch).heads
    except Divided:
        raise
    except ValueError as e:
        raise ValueError(
            f"{who}: found no output layer in {type(root).__name__} ({str(e).partition('. ')[0]}). Name it,"
            f" {who}(head=...): {_likely(root)}."
        ) from e
    named = dict(root.named_parameters())
    weights = {id(named[name]) for name in names}
    maps = [m.path for m in linear_maps(root) if id(m.module.weight) in weights]
    tables = [path for path, m in root.named_modules() if isinstance(m, nn.Embedding) and id(m.weight) in weights]
    found = maps or tables
    if len(weights) != 1 or not found:
        raise ValueError(
            f"{who}: expected one output layer in {type(root).__name__}, found {', '.join(maps + tables) or 'none'}. Name it,"
            f" {who}(head=...): {_likely(root)}."
        )
    return found[0]


def site_of(root: nn.Module, path: str) -> Site:
    """Return the place at which the output layer's calls get placeholders."""
    m = root.get_submodule(path)
    weight = _weight(m)
    assert isinstance(weight, nn.Parameter)
    called = isinstance(m, nn.Linear)
    return site_at(root, path if called else f"{path}.weight", called, *weight.shape)


def _weight(m: nn.Module) -> Tensor | None:
    weight = m._parameters.get("weight")
    return weight if weight is not None and weight.ndim == 2 else None


def _likely(root: nn.Module) -> str:
    tables = {m.num_embeddings for m in root.modules() if isinstance(m, nn.Embedding)}
    maps = [m for m in linear_maps(root) if m.out_features in tables] or linear_maps(root)
    return ", ".join(m.path for m in maps[-5:]) or "none"
