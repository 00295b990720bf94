"""How much of a batch of tokens is padding, and which of its tensors are wider than training needs."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core.batches import tensors

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint8)


def padded(batch: Any, looked_up: Collection[int]) -> tuple[int, int]:
    """The positions of tokens in a batch that are padding, and all of them.

    A mask of the batch says which positions are padding. Without one, it is the token that repeats at the ends of most rows.

    Args:
        batch: of the step.
        looked_up: addresses of the storages that were indices of embeddings in the step.
    """
    found = tensors(batch)
    ids = [(path, t) for path, t in found if t.ndim == 2 and t.dtype in _INTEGERS and t.shape[1] > 1]
    ids = [(path, t) for path, t in ids if t.untyped_storage()._cdata in looked_up]
    if not ids:
        return 0, 0
    _, tokens = max(ids, key=lambda pair: pair[1].numel())
    said = [n for _, t in found if t is not tokens and t.shape == tokens.shape and (n := _said(t, tokens)) is not None]
    return (min(said) if said else _runs(tokens)), tokens.numel()


def _said(mask: Tensor, tokens: Tensor) -> int | None:
    """The positions that a mask of padding hides; None for any other tensor.

    It hides an end of each row, where the tokens are the same everywhere.
    """
    if mask.dtype is not torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        return None
    mask = mask.to(torch.bool)
    for kept in (mask, ~mask):
        steps = kept[:, 1:].to(torch.int8) - kept[:, :-1].to(torch.int8)
        one_end = bool((steps <= 0).all()) or bool((steps >= 0).all())
        if one_end and bool(kept.any(1).all()) and len(tokens[~kept].unique()) <= 1:
            return int((~kept).sum())
    return None


def _runs(tokens: Tensor) -> int:
    """The positions in runs of one token at the rows' ends; 0 unless most rows that are not full end so."""
    last = tokens[:, -1]
    values, counts = last.unique(return_counts=True)
    pad = values[counts.argmax()]
    same = tokens == pad
    lengths = same.flip(1).to(torch.int64).cumprod(1).sum(1)
    ended = lengths >= 2
    elsewhere = int(same.sum()) - int(lengths.sum())
    if int(ended.sum()) < max(2, len(tokens) // 3) or elsewhere > int(lengths.sum()) // 10 or len(lengths.unique()) < 2:
        return 0
    return int(lengths.sum())


def wide(batch: Any, used: Collection[int]) -> list[str]:
    """The paths of a batch's tensors in float64 that the step reads.

    Args:
        batch: of the step.
        used: addresses of the storages that operations of the step read.
    """
    return [
        f"batch{path}"
        for path, t in tensors(batch)
        if t.dtype is torch.float64 and t.ndim and t.untyped_storage()._cdata in used
    ]
