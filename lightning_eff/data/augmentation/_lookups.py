"""Find the embeddings in which a module looks up the tokens of a batch, by running its step once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.batches import num_samples
from lightning_eff._core.patches import hook_before
from lightning_eff._core.steps import Step


def made_of(ids: Tensor, tokens: Tensor) -> bool:
    """Return whether ``ids`` are ``tokens`` (B, T), some of their columns, or tokens shifted right, as a decoder's inputs are.

    Negative entries of ``tokens`` (ignored labels) match anything.
    """
    if ids.ndim != 2 or tokens.ndim != 2 or len(ids) != len(tokens):
        return False
    length, whole = ids.shape[1], tokens.shape[1]

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.numel() > 0 and bool(((a == b) | (b < 0)).all())

    starts = {0, 1, whole - length}
    within = any(same(ids, tokens[:, s : s + length]) for s in starts if 0 <= s <= whole - length)
    return within or (length > 1 and length <= whole + 1 and same(ids[:, 1:], tokens[:, : length - 1]))


def of_places(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the output of an embedding call depends only on the positions of its ids, not on their values."""
    if (
        not isinstance(module, nn.Embedding)
        or type(module).forward is nn.Embedding.forward
        or module.max_norm is not None
    ):
        return False
    ids = args[0] if args else kwargs["input"]
    others = (ids.clamp(min=0) + 1) % module.num_embeddings
    changed = module.forward(others, *args[1:], **kwargs) if args else module.forward(**{**kwargs, "input": others})
    return torch.equal(changed, module.forward(*args, **kwargs))


@dataclass(frozen=True)
class Lookups:
    """The calls of a module's embeddings in one step.

    Attributes:
        embeddings: every ``nn.Embedding`` of the module, by path.
        ids: by path, the ids of each of its calls.
        places: the paths of those whose output depends on positions only.
    """

    embeddings: dict[str, nn.Embedding]
    ids: dict[str, list[Tensor]]
    places: set[str]

    def of(self, some: Sequence[Tensor]) -> list[str]:
        """Return the paths of the embeddings that were called on any of these tokens (B, T), or on a part of them."""
        known = {path: calls for path, calls in self.ids.items() if path not in self.places}
        return [path for path, calls in known.items() if any(made_of(ids, t) for ids in calls for t in some)]

    def none(self, tokens: Tensor, *, who: str) -> ValueError:
        """Return the error for tokens that were looked up in no embedding."""
        shapes = [f"{path} {tuple(ids.shape)}" for path, calls in self.ids.items() for ids in calls]
        return ValueError(
            f"{who}: no nn.Embedding was called on the tokens {tuple(tokens.shape)} of the batch (calls were:"
            f" {', '.join(shapes[:5]) or 'none'}). Name other tokens with keys=, or remove {who}."
        )


def lookups(step: Step, batch: Any) -> Lookups:
    """Run the step on ``batch`` without a trace, and return the calls of the module's embeddings."""
    every = {path: m for path, m in step.module.named_modules() if isinstance(m, nn.Embedding)}
    found = Lookups(every, {path: [] for path in every}, set())

    def noting(path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = args[0] if args else kwargs.get("input")
            if isinstance(ids, Tensor):
                found.ids[path].append(ids.detach())
                if of_places(module, args, kwargs):
                    found.places.add(path)

        return note

    handles = [hook_before(m, noting(path), with_kwargs=True) for path, m in every.items()]
    try:
        step.forward_only(batch, num_samples(batch), transform=False)
    finally:
        for handle in handles:
            handle.remove()
    return found
