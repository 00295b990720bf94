"""The dimension of a module's ids along which tokens follow one another, as far as it can be known."""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def check_order(root: nn.Module, *, who: str) -> None:
    """Raise ``ValueError`` if a part of ``root`` takes sequences first, so that ids may be (T, B)."""
    first = next((path for path, m in root.named_modules() if getattr(m, "batch_first", None) is False), None)
    if first is not None:
        raise ValueError(
            f"{who}: {first} ({type(root.get_submodule(first)).__name__}) has batch_first=False, so ids may have shape (T, B)."
            f" Give {who}(batch_first=False) if the token embedding gets (T, B), or batch_first=True if it gets (B, T)."
        )


def check_untransposed(ids: Tensor, batch: Any, *, who: str) -> None:
    """Raise ``ValueError`` if ``ids`` are a transposed tensor of the batch."""
    if ids.ndim != 2 or ids.shape[0] == ids.shape[1] == 1:
        return
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point()]
    if any(t.shape == ids.shape and bool((t == ids).all()) for t in tensors):
        return
    if any(t.T.shape == ids.shape and bool((ids == t.T).all()) for t in tensors):
        raise ValueError(
            f"{who}: the token embedding gets the batch's ids transposed, with shape {tuple(ids.shape)}. Give"
            f" {who}(batch_first=False)."
        )
