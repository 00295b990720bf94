"""Pass a block's inputs in rows, and test on a copy whether the block then computes the same."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_eff._core import rng
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core._tokens.checking import (
    TOLERANCE,
    TRIES,
    CannotTake,
    called,
    candidates,
    moved,
    moved_input,
    token_dim,
)
from lightning_eff._core._tokens.inputs import BLIND, Call, Path, is_cache, leaves, mapped, told
from lightning_eff._core.blocks import hidden_of, split_output
from lightning_eff.data.tokens._packing.attention import Attention
from lightning_eff.data.tokens._packing.flex import EVERY, Mods
from lightning_eff.data.tokens._packing.rows import Rows, in_rows, packed

_TRIES_OF_MODS = 16
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How a block is called on rows.

    Attributes:
        hidden: the path of the hidden state, (B, T, D) or (T, B, D).
        dim: its token dimension, 1 or 0.
        dims: the token dimensions of the other inputs, by path.
        true_hides: whether True in a boolean mask means that a token does not see another.
        one_row: whether all samples share one row, because an input has no sample dimension.
        hides: the paths of masks that let no token see padding.
        mods: what the functions passed to FlexAttention use.
        flex_hides: whether its block masks let no token see padding.
    """

    hidden: Path
    dim: int
    dims: Mapping[Path, Dims]
    true_hides: bool = False
    one_row: bool = False
    hides: frozenset[Path] = frozenset()
    mods: Mods = EVERY[0]
    flex_hides: bool = False

    def in_rows(self, call: Call, rows: Rows, held: dict[Any, tuple[Tensor, Tensor]] | None = None) -> Call:
        """Return the call on rows, without caches of keys and values.

        Args:
            call: the call on the padded batch.
            rows: the positions of the tokens.
            held: inputs in rows that other blocks of this step received, by their source.
        """

        def take(path: Path, value: Any) -> Any:
            if path == self.hidden:
                return packed(value, rows, self.dim)
            if is_cache(value):
                return None
            dims = self.dims.get(path)
            if dims is None:
                return value
            if held is None or value.requires_grad:
                return taken(value, dims, rows, true_hides=self.true_hides)
            key = (id(value), dims, self.true_hides, id(rows))
            if key not in held:
                held[key] = value, taken(value, dims, rows, true_hides=self.true_hides)
            return held[key][1]

        return mapped(call, take)


def taken(value: Tensor, dims: Dims, rows: Rows, *, true_hides: bool) -> Tensor:
    """Return an input of the padded batch in rows.

    Args:
        value: the input, with a sample dimension in front, (B or 1, ..), or without one if all samples share a row.
        dims: its token dimensions: one, or two for a mask of which token sees which. A mask of visible tokens, (B, H, 1, T),
            becomes one of which token sees which.
        rows: the positions of the tokens.
        true_hides: the value in a boolean mask where a token does not see another.
    """
    size = rows.keep.shape[0]
    if not _by_sample(value, dims, size):
        place = rows.place[0]
        for dim in dims:
            value = value.index_select(dim, place)
        return value if len(dims) == 1 else _apart(value, dims, rows.same[0], true_hides)
    if _of_keys(value, dims):
        value, dims = value.expand(-1, -1, rows.keep.shape[1], -1), (2, 3)
    sample = rows.sample if value.shape[0] == size else torch.zeros_like(rows.sample)
    if len(dims) == 1:
        return value.movedim(dims[0], 1)[sample, rows.place].movedim(1, dims[0])
    found = value.movedim(dims, (1, 2))[sample[:, :, None], rows.place[:, :, None], rows.place[:, None, :]]
    return _apart(found.movedim((1, 2), dims), dims, rows.same, true_hides)


def _by_sample(value: Tensor, dims: Dims, size: int) -> bool:
    return 0 not in dims and value.ndim > len(dims) and value.shape[0] in (1, size)


def _of_keys(value: Tensor, dims: Dims) -> bool:
    return value.ndim == 4 and dims == (3,) and value.shape[2] == 1


def _apart(mask: Tensor, dims: Dims, same: Tensor, true_hides: bool) -> Tensor:
    """Return a mask in which no token sees another sample; ``same`` is (R, L, L), or (L, L) without rows."""
    shape = list(mask.shape) if same.ndim == 2 else [same.shape[0], *mask.shape[1:]]
    other = (~same).reshape([n if d in dims or (d == 0 and same.ndim == 3) else 1 for d, n in enumerate(shape)])
    if mask.dtype == torch.bool:
        return mask.masked_fill(other, true_hides)
    return mask.masked_fill(other, torch.finfo(mask.dtype).min if mask.is_floating_point() else 0)


def sees_padding(value: Tensor, dims: Dims, rows: Rows, *, true_hides: bool) -> Tensor | None:
    """Return whether a mask lets any token see padding, as a tensor; None if it is shared by samples or no mask."""
    size = rows.keep.shape[0]
    if not _by_sample(value, dims, size) or value.shape[0] != size:
        return None
    if _of_keys(value, dims):
        value, dims = value.expand(-1, -1, rows.keep.shape[1], -1), (2, 3)
    if len(dims) != 2:
        return None
    hidden = true_hides if value.dtype == torch.bool else 0
    seen = value > BLIND if value.is_floating_point() else value != hidden
    return _reaches(seen.movedim(dims, (1, 2)), rows)


def _reaches(seen: Tensor, rows: Rows) -> Tensor:
    while seen.ndim > 3:
        seen = seen.any(dim=-1)
    return (seen & rows.keep.unsqueeze(2) & ~rows.keep.unsqueeze(1)).any()


def find_plan(
    block: nn.Module, call: Call, keep: Tensor, capacity: int | None, attention: Attention, generator: Generator
) -> Plan:
    """Find how ``block`` is called on rows, on a float64 copy with randomly changed weights and inputs.

    Args:
        block: the block.
        call: a real call of it.
        keep: which places hold tokens, (B, T), bool.
        capacity: the tokens of a row, see :func:`in_rows`.
        attention: attention of samples in rows.
        generator: the source of random numbers.

    Raises:
        CannotTake: if it cannot be, with the reason and all inputs.
    """
    inputs = ", ".join(told(path, value) for path, value in leaves(call) if value is not None)
    try:
        with torch.no_grad(), rng.fork(), torch.autocast(hidden_of(*call).device.type, enabled=False):
            return _find(block, call, keep, capacity, attention, generator)
    except CannotTake as error:
        raise CannotTake(f"{error}. It is called with {inputs}") from None


def _find(
    block: nn.Module, call: Call, keep: Tensor, capacity: int | None, attention: Attention, generator: Generator
) -> Plan:
    hidden = hidden_of(*call)
    dim = token_dim(hidden, keep.shape[0])
    if hidden.shape[dim] != keep.shape[1]:
        raise CannotTake(
            f"its hidden state has {hidden.shape[dim]} tokens per sample, but the mask of padding has {keep.shape[1]} places"
        )
    for path, value in leaves(call):
        if isinstance(value, Tensor) and value.is_nested:
            raise CannotTake(f"{told(path, value)} is nested and cannot be split; use padded tensors, or none")
    at = next(path for path, value in leaves(call) if value is hidden)
    reasons: list[str] = []
    for dtype in (torch.float64, torch.float32):
        reasons = []
        square = hidden.shape[0] == hidden.shape[1]  # as many tokens as samples
        for along in (dim, 1 - dim)[: 1 + square]:
            try:
                trial = _Trial(block, call, along, dtype, generator)
            except Exception as error:  # a kernel without this dtype, or a block that cannot be copied
                reasons = [f"a copy of it in {str(dtype)[6:]} does not run ({first_line(error)})"]
                break
            for tried, plan in enumerate(_plans(call, at, along, keep)):
                rows = in_rows(keep, keep.numel() if plan.one_row else capacity)
                if rows is None:
                    continue
                found, told_why = _with_mods(trial, plan, rows, attention)
                if found is not None and (told_why := _at_other_length(trial, found, rows, attention)):
                    found = None
                if found is not None:
                    return replace(found, hides=_hiding(plan, call, rows))
                reasons += told_why
                if len(told_why) > 1 and tried >= _TRIES_OF_MODS:  # torch compiles each of them again
                    break
        else:
            break
    raise CannotTake(min(reasons, key=lambda reason: reason.startswith("in rows it fails")) if reasons else "no rows")


def _with_mods(trial: "_Trial", plan: Plan, rows: Rows, attention: Attention) -> tuple[Plan | None, list[str]]:
    """Return the plan with what FlexAttention's functions use, or the reasons against it."""
    reasons: list[str] = []
    for mods in EVERY:
        plan = replace(plan, mods=mods)
        attention.flex.forget()
        try:
            reason = trial.refuted(plan, rows, attention)
            if reason is None:
                return replace(plan, flex_hides=not any(bool(seen) for seen in attention.flex.seen)), []
            reasons.append(reason)
            if not attention.flex.met:
                break
        finally:
            attention.flex.forget()
    return None, reasons


def _at_other_length(trial: "_Trial", plan: Plan, rows: Rows, attention: Attention) -> list[str]:
    """Return why the plan fails in rows of another length, if an unchanged input is as long as these rows."""
    longer = in_rows(rows.keep, rows.keep.numel())
    along = [path for path, v in leaves(trial.call) if isinstance(v, Tensor) and rows.length in v.shape]
    whole = [path for path in along if path != plan.hidden and path not in plan.dims]
    if not whole or longer is None or longer.length == rows.length:
        return []
    return _with_mods(trial, plan, longer, attention)[1]


def _plans(call: Call, at: Path, dim: int, keep: Tensor) -> Iterator[Plan]:
    """Yield the possible plans, the likeliest first; those with one row last."""
    size, tokens = keep.shape
    values = dict(leaves(call))
    found = [dict(dims) for dims in islice(candidates(call, at, tokens), TRIES)]
    for one_row in (False, True):
        for dims in found:
            alone = [path for path, d in dims.items() if not _by_sample(values[path], d, size)]
            if alone and not one_row:
                continue
            masks = any(len(d) == 2 or _of_keys(values[p], d) for p, d in dims.items() if values[p].dtype == torch.bool)
            for true_hides in (False, True)[: 1 + masks]:
                yield Plan(at, dim, dims, true_hides, one_row)


def _hiding(plan: Plan, call: Call, rows: Rows) -> frozenset[Path]:
    found: set[Path] = set()
    for path, value in leaves(call):
        if path in plan.dims:
            seen = sees_padding(value, plan.dims[path], rows, true_hides=plan.true_hides)
            if seen is not None and not bool(seen):
                found.add(path)
    return frozenset(found)


class _Trial:
    """A copy of a block with randomly changed weights and inputs, which runs on the padded batch and on rows."""

    def __init__(self, block: nn.Module, call: Call, dim: int, dtype: torch.dtype, generator: Generator) -> None:
        self.dtype, self.dim = dtype, dim
        self.block = moved(block, dtype, generator)
        for m in self.block.modules():  # their statistics would cover only tokens
            m.training = isinstance(m, _NormBase)
        hidden = hidden_of(*call)
        self.call = mapped(call, lambda _, value: moved_input(value, value is hidden, dtype, generator))
        self.hidden = hidden_of(*self.call)
        self.plain = split_output(called(self.block, self.call))[0]
        if self.plain.shape != self.hidden.shape:
            raise CannotTake(
                f"it returns a hidden state of shape {tuple(self.plain.shape)} for one of {tuple(self.hidden.shape)}"
            )

    def refuted(self, plan: Plan, rows: Rows, attention: Attention) -> str | None:
        """Return why the block cannot be called on these rows in this way; None if it can."""
        try:
            call = plan.in_rows(self.call, rows)
            with attention.within(self.block, rows, plan.mods):
                new, rest = split_output(called(self.block, call))
        except Exception as error:
            return f"in rows it fails ({first_line(error)})"
        if new.shape != hidden_of(*call).shape:
            return f"of {tuple(hidden_of(*call).shape)} tokens it makes {tuple(new.shape)}"
        got, expected, entered = (
            (t if self.dim == 1 else t.transpose(0, 1)).flatten(0, 1) for t in (new, self.plain, self.hidden)
        )
        got = got if rows.slots is None else got[rows.slots]
        expected, entered = expected[rows.flat], entered[rows.flat]
        if not bool((got - expected).abs().max() <= TOLERANCE[self.dtype] * (expected - entered).abs().max() + 1e-12):
            return (
                "without padding, or with several samples in a row, it computes something else: its tokens see padding, or it"
                " mixes tokens in another way than F.scaled_dot_product_attention, flex_attention, by a global of a file or an"
                " attribute of its own, or a mask that it receives (convolutions over tokens, recurrences, attention written"
                " out with a mask of its own), or it depends on statistics of the batch"
            )
        for value in rest or ():
            if isinstance(value, Tensor) and not _handed(value, call):
                return f"it returns {tuple(value.shape)} besides the hidden state, which cannot be restored from rows"
        return None


def _handed(part: Tensor, call: Call) -> bool:
    """Return whether an output has the shape and value of an input that is passed on."""
    return any(isinstance(v, Tensor) and v.shape == part.shape and torch.equal(v, part) for _, v in leaves(call))
