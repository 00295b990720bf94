"""The arguments of an attention call: which keys each query may see, with what scale, and whether a mask can be read."""

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MODULE = inspect.signature(F.multi_head_attention_forward)


class CannotReplace(ValueError):
    """An attention call that a technique cannot replace, with the reason."""


@dataclass(frozen=True)
class Call:
    """One call of ``F.scaled_dot_product_attention``, or an equivalent one.

    Attributes:
        query: (B, H, L, E).
        key: (B, H', S, E). H is a multiple of H', and H / H' consecutive query heads share each key head.
        value: (B, H', S, E').
        mask: True where a key may be seen, or numbers added to the scores; broadcasts to (B, H, L, S). Or None.
        dropout: the fraction of weights that is dropped, in [0, 1).
        causal: whether query i sees only keys up to i.
        scale: the factor of the products.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float

    @property
    def groups(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def whole_key(self) -> Tensor:
        """The keys of each query head, (B, H, S, E)."""
        return self.key if self.groups == 1 else self.key.repeat_interleave(self.groups, dim=1)

    @property
    def whole_value(self) -> Tensor:
        """The values of each query head, (B, H, S, E')."""
        return self.value if self.groups == 1 else self.value.repeat_interleave(self.groups, dim=1)

    def may_see(self) -> Tensor | None:
        """Return which keys each query may see: bool, broadcasts to (B, H, L, S); None if it may see all."""
        seen = None if self.mask is None else visible(self.mask)
        if not self.causal:
            return seen
        below = triangle(self.query.shape[-2], self.key.shape[-2], self.query.device)
        return below if seen is None else seen & below

    def scores(self) -> Tensor:
        """Return ``q k^T scale`` plus the mask, ``-inf`` where a key may not be seen: (B, H, L, S)."""
        return self.scores_of(self.query, self.whole_key)

    def scores_of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return :meth:`scores` for other queries and keys, (B, H, L, .) and (B, H, S, .)."""
        found = query @ key.transpose(-1, -2) * self.scale
        if self.mask is not None and self.mask.dtype != torch.bool:
            found = found + self.mask
        seen = self.may_see()
        return found if seen is None else found.masked_fill(~seen, -torch.inf)

    def run(self) -> Tensor:
        """Compute the call with the next attention implementation."""
        options: dict[str, Any] = {"enable_gqa": True} if self.groups > 1 else {}
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, self.mask, self.dropout, self.causal, scale=self.scale, **options
        )

    def of_keys(self, keep: Tensor) -> "Call":
        """Return the call in which queries see only those of their visible keys for which ``keep`` is True: bool, (B, H, L, S).

        The weights of these keys sum to one. A query without any visible key keeps its mask.
        """
        seen = self.may_see()
        keep = keep if seen is None else keep & seen
        if self.mask is None or self.mask.dtype == torch.bool:
            return replace(self, mask=keep, causal=False)
        none = keep.any(-1, keepdim=True).logical_not()  # such a row keeps its own numbers
        return replace(self, mask=torch.where(keep | none, self.mask, -torch.inf).to(self.mask.dtype), causal=False)


def triangle(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return which keys causal attention shows, (L, S), aligned at the first query and key as for ``is_causal``."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def visible(mask: Tensor) -> Tensor:
    """Return where a mask, of bool or of added numbers, shows a key."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, tuple[int, ...]]:
    """Return the call with these arguments of ``F.scaled_dot_product_attention``, and the dimensions before its heads.

    Raises:
        CannotReplace: if the tensors are of unsupported kinds.
    """
    given: dict[str, Any] = {**dict(zip(FUSED, args, strict=False)), **kwargs}
    tensors: tuple[Any, ...] = tuple(given.get(name) for name in FUSED[:4])
    q, k, v, mask = tensors
    for name, t in zip(FUSED, tensors, strict=False):
        if t is not None and (type(t) not in (Tensor, nn.Parameter) or t.is_nested):
            raise CannotReplace(f"its {name} is a {type(t).__name__}, a tensor class that is not supported")
    if q.ndim < 2 or not (q.ndim == k.ndim == v.ndim):
        raise CannotReplace(f"queries, keys and values have {q.ndim}, {k.ndim} and {v.ndim} dimensions")
    front = tuple(q.shape[:-2]) if q.ndim < 4 else tuple(q.shape[:-3])
    q, k, v = (_of_four(t) for t in (q, k, v))
    size = max(q.shape[0], k.shape[0])
    q, k, v = (t.expand(size, *t.shape[1:]) for t in (q, k, v))
    if not given.get("enable_gqa") and k.shape[1] != q.shape[1]:
        heads = max(q.shape[1], k.shape[1])
        q, k, v = (t.expand(-1, heads, -1, -1) for t in (q, k, v))
    if v.shape[1] != k.shape[1]:
        raise CannotReplace(f"it has {k.shape[1]} heads of keys and {v.shape[1]} of values")
    if mask is not None:
        mask = _mask(mask, front)
    scale = given.get("scale")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    causal, dropout = bool(given.get("is_causal", False)), float(given.get("dropout_p", 0.0))
    return Call(q, k, v, mask, dropout, causal, scale), front


def _of_four(t: Tensor) -> Tensor:
    return t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t.flatten(0, -4)


def _mask(mask: Tensor, front: tuple[int, ...]) -> Tensor:
    if mask.ndim <= 4:
        return mask[(None,) * (4 - mask.ndim)]
    return mask.expand(*front, *mask.shape[-3:]).flatten(0, -4)


def as_term(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of ``nn.MultiheadAttention``, where True hides, as a term to add to the scores, in the dtype of ``like``."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def restored(output: Tensor, call: Call, front: tuple[int, ...], dims: int) -> Tensor:
    """Convert an output (B, H, L, E') to the form for queries of ``dims`` dimensions."""
    if dims < 4:
        return output[(0,) * (4 - dims)]
    return output.unflatten(0, front) if dims > 4 else output


def keys_alone(call: Call, who: str) -> tuple[Tensor | None, bool]:
    """Return a mask's value for each key, (B or 1, H or 1, S), bool or numbers, and whether attention is causal.

    Methods without a weight for each pair cannot use more. A causal mask with padding on either side is recognized, whatever
    padding itself may see.

    Raises:
        CannotReplace: if the mask contains more: windows, packed samples, biases of pairs.
    """
    mask = call.mask
    if mask is None:
        return None, call.causal
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if mask.shape[-2] == 1 or bool((mask == mask[..., :1, :]).all()):
        return mask[..., 0, :].expand(*mask.shape[:2], keys), call.causal
    seen = visible(mask).expand(*mask.shape[:2], queries, keys)
    numbers = mask.dtype != torch.bool and bool((mask.masked_fill(~visible(mask), 0) != 0).any())
    if queries == keys and not numbers and not call.causal:
        there = seen.any(-2)
        expected = there[..., None, :] & triangle(queries, keys, mask.device)
        if bool(((seen == expected) | ~there[..., None]).all()):
            return there, True
    raise CannotReplace(
        f"its mask of shape {tuple(mask.shape)} contains more than padding and causality, and {who} has no weight for each"
        " pair to apply it to"
    )
