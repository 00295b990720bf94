"""The tokens and labels of a batch of texts, and the tokens that are never masked."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.batches import lies_at, tensors

SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def named_by_configs(module: nn.Module, names: Iterable[str]) -> set[int]:
    """Return the token ids that Hugging Face configs in ``module`` store under ``names``."""
    configs = [m.config for m in module.modules() if hasattr(m, "config")]
    found = [getattr(config, name, None) for config in configs for name in names]
    listed = [token for one in found for token in (one if isinstance(one, list | tuple) else [one])]
    return {token for token in listed if isinstance(token, int)}


def tokens_and_labels(batch: Any, keys: list[str | int]) -> tuple[Tensor, Tensor] | None:
    """Return the tokens and labels at ``keys``, or None without two such tensors of one shape, the first of integers."""
    named = tensors(batch)
    ids, labels = (next((t for path, t in named if lies_at(path, key)), None) for key in keys)
    if ids is None or labels is None or ids.shape != labels.shape or ids.is_floating_point():
        return None
    return ids, labels


def maskable(batch: Any, ids: Tensor, special: Tensor | None) -> Tensor:
    """Return the places of ``ids`` that the batch's ``attention_mask`` allows and that hold no special token, bool."""
    found = torch.ones_like(ids, dtype=torch.bool)
    for path, t in tensors(batch):
        if lies_at(path, "attention_mask") and t.shape == ids.shape:
            found &= t != 0
    if special is not None and len(special):
        found &= ~torch.isin(ids, special.to(ids.device))
    return found


def no_texts(who: str, batch: Any, keys: list[str | int]) -> ValueError:
    """Return the error for a batch without tokens and labels at ``keys``."""
    return ValueError(
        f"{who}: found no tokens {keys[0]!r} and labels {keys[1]!r} (integers, same shape) in the batch, which holds"
        f" {listed(batch)}. Name them, as in keys=['tokens', 'targets'] or keys=[0, 1]."
    )


def listed(batch: Any) -> str:
    """Return the tensors of a batch with their shapes and dtypes, for messages."""
    found = [f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in tensors(batch)]
    return ", ".join(found) or "no tensors"
