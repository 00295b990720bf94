"""Sequences in batches of any structure: find them by shape, and shorten them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core.batches import lies_at, map_tensors, num_samples, tensors


def truncate(t: Tensor, dims: tuple[int, ...], length: int) -> Tensor:
    """Return the first ``length`` entries of ``t`` along each of ``dims``."""
    for dim in dims:
        t = t.narrow(dim, 0, length)
    return t.contiguous()


def split(t: Tensor, dims: tuple[int, ...], length: int) -> Tensor:
    """Return ``t`` of shape (B, ..T..) as (B T / length, ..length..), with the pieces of a sample in order.

    If the sequence has two dimensions, as in a mask (B, T, T), the pieces are the blocks on the diagonal.
    """
    starts = range(0, t.shape[dims[0]], length)
    if dims == (1,):
        return t.reshape(t.shape[0] * len(starts), length, *t.shape[2:])
    pieces = []
    for first in starts:
        piece = t
        for dim in dims:
            piece = piece.narrow(dim, first, length)
        pieces.append(piece)
    return torch.stack(pieces, dim=1).flatten(0, 1)


def split_overlapping(t: Tensor, length: int) -> Tensor:
    """Return ``t`` (B, T + 1) as (B T / length, length + 1). Each piece ends with the token with which the next begins."""
    return t.unfold(1, length + 1, length).flatten(0, 1).contiguous()


def restart_positions(pieces: Tensor) -> Tensor:
    """Return position ids (b, L) whose first run of consecutive numbers starts at 0; later runs within a piece stay."""
    breaks = (pieces.diff(dim=1) != 1).cumsum(dim=1)
    first_run = torch.cat([torch.ones_like(breaks[:, :1], dtype=torch.bool), breaks == 0], dim=1)
    return torch.where(first_run, pieces - pieces[:, :1], pieces)


def unblind(mask: Tensor, dims: tuple[int, ...], *, hidden: float | bool, seen: float | bool) -> Tensor:
    """Return ``mask`` with ``seen`` in each row of the last of ``dims`` that is all ``hidden``, which would give NaN.

    Such a row then sees all of its keys; in a square mask, only itself.
    """
    blind = (mask == hidden).all(dim=dims[-1], keepdim=True)
    if len(dims) > 1:
        eye = torch.eye(mask.shape[dims[-1]], dtype=torch.bool, device=mask.device)
        blind = blind & eye.reshape([size if dim in dims[-2:] else 1 for dim, size in enumerate(mask.shape)])
    return mask.masked_fill(blind, seen)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch.

    Attributes:
        size: the number of samples, B.
        full: their length, T.
        dims: the dimensions along the sequence, by the tensor's id.
        names: the tensor's own key, field or position, by its id.
        whole: the other tensors with one entry per sample, as text.
        shifted: whether the batch is one tensor (B, T + 1) from which the module makes inputs and targets.
    """

    size: int
    full: int
    dims: dict[int, tuple[int, ...]]
    names: dict[int, str]
    whole: list[str]
    shifted: bool


def sequence_dims(shape: Sequence[int], full: int) -> tuple[int, ...]:
    """Return the dimensions along the sequence in (B, T), (B, T, D), (B, T, T), (B, 1, 1, T), (B, 1, T, T); otherwise ()."""
    first = next((dim for dim, size in enumerate(shape) if dim > 0 and size != 1), None)
    if first is None or shape[first] != full:
        return ()
    return tuple(dim for dim, size in enumerate(shape) if dim >= first and size == full)


def find_sequences(batch: Any, keys: Sequence[str | int] | None, multiple_of: int, *, who: str) -> Sequences:
    """Find the sequences of a batch of any structure.

    Without ``keys``, T is the length of the batch's integer tensors (B, T). Each tensor with B rows, or with one row for all
    samples, is searched for dimensions of that length.

    Args:
        batch: tensors in a dict, tuple, list or dataclass, also nested, or one tensor.
        keys: names or positions of the tensors (B, T, ...) with the sequence in dimension 1, and of no others.
        multiple_of: a batch of one tensor (B, T + 1), T a multiple of this and this > 1, is ``shifted``.
        who: the technique's name, for messages.

    Raises:
        ValueError: if there are none, if they have several lengths, or if ``keys`` name no tensor; with the tensors found.
    """
    named = tensors(batch)
    listed = (
        ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in named) or "no tensors"
    )
    mend = (
        "Set keys= to the tensors with the sequence in dimension 1: their names in a dict or dataclass, such as"
        " keys=['input_ids', 'labels'], or their positions in a tuple, such as keys=[0, 1]."
    )
    if keys is None:
        integers = [t for _, t in named if t.ndim == 2 and _is_integer(t)]
        # positions (1, T) and masks (T, T) that all samples share do not show the number of samples
        own = [t for t in integers if t.shape[0] not in (1, t.shape[1])] or integers
        size, rows = (num_samples(batch), num_samples(own)) if own else (0, 0)
        chosen = [t for t in integers if t.shape[0] == size] if size > 1 else []
        if not chosen and (size == 1 or rows == 1):
            chosen = [t for t in integers if t.shape[0] == rows]
        if not chosen:
            of = f" of {size} samples" if integers else ""
            raise ValueError(f"{who}: found no integer tensor of shape (B, T) in the batch{of}: {listed}. {mend}")
    else:
        by_key = [[t for path, t in named if lies_at(path, key)] for key in keys]
        chosen = [t for found in by_key for t in found]
        missing = [key for key, found in zip(keys, by_key, strict=True) if not found]
        if missing or any(t.ndim < 2 for t in chosen):
            what = f"{missing} are not in the batch" if missing else "they name tensors with fewer than two dimensions"
            raise ValueError(f"{who}(keys={list(keys)}): {what}; it holds {listed}. {mend}")
    shapes = sorted({tuple(t.shape[:2]) for t in chosen})
    if len(shapes) > 1:
        raise ValueError(
            f"{who}: the tensors with a sequence in dimension 1 differ in (B, T), {shapes}: {listed}. {mend}"
        )
    size, full = shapes[0]
    if len(named) == 1 and chosen[0].ndim == 2 and full % multiple_of == 1:
        return Sequences(size, full - 1, {id(chosen[0]): (1,)}, {}, [], shifted=True)
    dims: dict[int, tuple[int, ...]] = {}
    whole: list[str] = []
    for path, t in named:
        if keys is not None:
            along = (1,) if any(t is c for c in chosen) else ()
        elif t.ndim and t.shape[0] in (size, 1):
            along = sequence_dims(t.shape, full)
        else:  # a mask that all samples share
            along = (0, 1) if tuple(t.shape) == (full, full) else ()
        if along:
            dims[id(t)] = along
        elif t.ndim and t.shape[0] == size:
            whole.append(f"{path} {tuple(t.shape)}")
    names = {id(t): re.sub(r"^.*?(\w+)'?\]?$", r"\1", path) for path, t in named}
    return Sequences(size, full, dims, names, whole, shifted=False)


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def shorten(batch: Any, found: Sequences, length: int, *, reshape: bool, who: str) -> Any:
    """Return the batch in the same structure with sequences of ``length`` tokens: split if ``reshape``, otherwise truncated.

    Raises:
        ValueError: if ``reshape`` and a tensor with one entry per sample cannot be split.
    """
    if reshape and found.whole:
        raise ValueError(
            f"{who}(mode='reshape'): {', '.join(found.whole)} in the batch hold one entry for each of {found.size}"
            " samples and cannot be split with the sequences. Use mode='truncate', or, if they have the sequence in"
            " dimension 1, add them to keys=."
        )

    def short(t: Tensor) -> Tensor:
        dims = found.dims.get(id(t))
        if dims is None:
            return t
        if found.shifted:
            return split_overlapping(t, length) if reshape else truncate(t, dims, length + 1)
        name = found.names[id(t)]
        if reshape and dims[0] > 0:
            t = split(t.expand(found.size, *t.shape[1:]), dims, length)
            t = restart_positions(t) if name.endswith("position_ids") and t.ndim == 2 else t
        else:
            t = truncate(t, dims, length)
        if t.is_floating_point() and t.ndim > 2 and (len(dims) > 1 or name.endswith("mask")):
            return unblind(t, dims, hidden=float("-inf"), seen=0.0)
        if name.endswith("key_padding_mask") and t.dtype == torch.bool:
            return unblind(t, dims, hidden=True, seen=False)
        return unblind(t, dims, hidden=0, seen=1) if name.endswith("attention_mask") else t

    return map_tensors(batch, short)
