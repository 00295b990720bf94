"""Samples of a padded batch without padding, several per row: token positions, and hidden states in both directions."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack samples into rows of at most ``capacity`` tokens: the longest first, each into the first row with room for it.

    Args:
        lengths: the tokens of each sample, each <= ``capacity``. Empty samples are in no row.
        capacity: the tokens of a row.

    Returns:
        The samples of each row. The number of rows is at most 11/9 of the optimum, plus one (Johnson 1973).
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        at = next((r for r, left in enumerate(room) if left >= lengths[i]), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(capacity)
        rows[at].append(i)
        room[at] -= lengths[i]
    return rows


@dataclass(frozen=True)
class Piece:
    """Consecutive slots in one row, ``start`` to ``stop``: one sample's tokens, or none (``sample`` is -1)."""

    row: int
    start: int
    stop: int
    sample: int


@dataclass(frozen=True)
class Rows:
    """The positions of the tokens of a padded batch of B samples and T places in R rows of L slots.

    A sample's tokens are consecutive and in order. An empty slot holds a copy of its row's first token, which only empty
    slots see.

    Attributes:
        keep: which places hold tokens, (B, T), bool.
        sample: the sample of each slot, (R, L), long.
        place: the place in its sample of each slot's token, (R, L), long.
        segment: the sample of each slot, (R, L), long; -1 for empty slots.
        pieces: consecutive slots, row by row.
        slots: the N tokens' slots in the flattened rows, (N,), long; None without empty slots.
        flat: the N tokens' places in the flattened batch, (N,), long.
        padding: the other places of the flattened batch, (B T - N,), long.
    """

    keep: Tensor
    sample: Tensor
    place: Tensor
    segment: Tensor
    pieces: tuple[Piece, ...]
    slots: Tensor | None
    flat: Tensor
    padding: Tensor

    @property
    def count(self) -> int:
        """R."""
        return self.sample.shape[0]

    @property
    def length(self) -> int:
        """L."""
        return self.sample.shape[1]

    @property
    def share(self) -> float:
        """R L / (B T)."""
        return self.sample.numel() / self.keep.numel()

    @functools.cached_property
    def source(self) -> Tensor:
        """The place in the flattened batch of each slot's token, (R L,), long."""
        return (self.sample * self.keep.shape[1] + self.place).flatten()

    @functools.cached_property
    def same(self) -> Tensor:
        """Which two slots of a row hold tokens of one sample, (R, L, L), bool."""
        return self.segment.unsqueeze(2) == self.segment.unsqueeze(1)

    @functools.cached_property
    def kind(self) -> tuple[bool, bool]:
        """Whether two samples share a row, and whether each sample's tokens are its first places."""
        shared = any(p.sample >= 0 and p.start > 0 for p in self.pieces)
        tokens = self.keep.cpu()
        return shared, bool((tokens[:, 1:] <= tokens[:, :-1]).all())


def in_rows(keep: Tensor, capacity: int | None) -> Rows | None:
    """Pack the tokens of a padded batch.

    Args:
        keep: which places hold tokens, (B, T), bool, on any device.
        capacity: the largest number of tokens per row. A longer sample extends it. None chooses it between that and T, to
            leave the fewest slots empty.

    Returns:
        The rows, or None if they would hold as many slots as the batch has places.
    """
    device, keep = keep.device, keep.cpu()
    lengths = keep.sum(dim=1).tolist()
    longest = max(lengths, default=0)
    if not longest:
        return None
    if capacity is None:  # the first of several with the fewest slots
        step = max((keep.shape[1] - longest) // _CAPACITIES, 1)
        sizes = {*range(longest, keep.shape[1], step), keep.shape[1]}
        tried = ((*_slots(lengths, size), size) for size in sorted(sizes))
        capacity = min(tried)[-1]
    chosen = first_fit(lengths, max(capacity, longest))
    length = max(sum(lengths[i] for i in row) for row in chosen)
    if len(chosen) * length >= keep.numel():
        return None
    places = [row.nonzero().flatten() for row in keep]
    sample = torch.zeros(len(chosen), length, dtype=torch.long)
    place, segment = torch.zeros_like(sample), torch.full_like(sample, -1)
    pieces: list[Piece] = []
    for r, row in enumerate(chosen):
        start = 0
        for i in row:
            stop = start + lengths[i]
            sample[r, start:stop], place[r, start:stop], segment[r, start:stop] = i, places[i], i
            pieces.append(Piece(r, start, stop, i))
            start = stop
        if start < length:
            sample[r, start:], place[r, start:] = row[0], places[row[0]][0]
            pieces.append(Piece(r, start, length, -1))
    filled = (segment >= 0).flatten()
    slots = None if bool(filled.all()) else filled.nonzero().flatten()
    flat = (sample * keep.shape[1] + place).flatten()[filled]
    padding = (~keep).flatten().nonzero().flatten()
    keep, sample, place, segment = (t.to(device) for t in (keep, sample, place, segment))
    slots = None if slots is None else slots.to(device)
    return Rows(keep, sample, place, segment, tuple(pieces), slots, flat.to(device), padding.to(device))


def _slots(lengths: Sequence[int], capacity: int) -> tuple[int, int]:
    """Return R L and L of the rows from :func:`first_fit`."""
    rows = first_fit(lengths, capacity)
    length = max(sum(lengths[i] for i in row) for row in rows)
    return len(rows) * length, length


_CAPACITIES = 8  # the number of capacities to try


class _Pack(torch.autograd.Function):
    """Map flattened places (B T, D) to flattened slots (R L, D); empty slots have no gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.shape = rows, hidden.shape
        return hidden.index_select(0, rows.source)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        rows: Rows = ctx.rows
        of_tokens = grad_outputs[0] if rows.slots is None else grad_outputs[0].index_select(0, rows.slots)
        return of_tokens.new_zeros(ctx.shape).index_copy(0, rows.flat, of_tokens), None


class _Unpack(torch.autograd.Function):
    """Map flattened slots to flattened places; padding holds the values of ``hidden``, whose gradient must not be used."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, new: Tensor, rows: Rows, watch: Callable[[Tensor], None]) -> Tensor:
        ctx.rows, ctx.watch, ctx.shape, ctx.dtype = rows, watch, new.shape, new.dtype
        of_tokens = new if rows.slots is None else new.index_select(0, rows.slots)
        dtype = torch.promote_types(hidden.dtype, new.dtype)
        return hidden.to(dtype).index_copy(0, rows.flat, of_tokens.to(dtype))

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        rows: Rows = ctx.rows
        ctx.watch(grad_outputs[0].index_select(0, rows.padding))
        of_tokens = grad_outputs[0].index_select(0, rows.flat).to(ctx.dtype)
        if rows.slots is not None:
            of_tokens = of_tokens.new_zeros(ctx.shape).index_copy(0, rows.slots, of_tokens)
        return None, of_tokens, None, None


def packed(hidden: Tensor, rows: Rows, dim: int) -> Tensor:
    """Return a hidden state (B, T, D), or (T, B, D) with ``dim`` 0, in rows: (R, L, D), or (L, R, D)."""
    flat = (hidden if dim == 1 else hidden.transpose(0, 1)).reshape(-1, hidden.shape[-1])
    new = _Pack.apply(flat, rows).unflatten(0, (rows.count, rows.length))  # pyright: ignore[reportOptionalMemberAccess]
    return new if dim == 1 else new.transpose(0, 1)


def unpacked(hidden: Tensor, new: Tensor, rows: Rows, dim: int, watch: Callable[[Tensor], None]) -> Tensor:
    """Return ``hidden`` with the tokens of ``new``, in rows, in their places; padding is unchanged.

    Args:
        hidden: (B, T, D), or (T, B, D) with ``dim`` 0.
        new: (R, L, D), or (L, R, D).
        rows: the positions of the tokens.
        dim: the token dimension.
        watch: a function that gets the gradients at padding, (P, D), which are then dropped.
    """
    if dim == 0:
        hidden, new = hidden.transpose(0, 1), new.transpose(0, 1)
    width = hidden.shape[-1]
    full: Any = _Unpack.apply(hidden.reshape(-1, width), new.reshape(-1, width), rows, watch)
    full = full.unflatten(0, hidden.shape[:2])
    return full if dim == 1 else full.transpose(0, 1)
