"""Sequence-length warm-up: train on short sequences first (Press et al. 2020, Shortformer; Li et al. 2021)."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.batches import map_tensors, num_samples, tensors
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique

WHO = "SequenceLengthWarmup"


def target_length(u: float, *, start: int, full: int, until: float) -> float:
    """``l(u) = start + (T - start) u / until`` for ``u < until``, and the full length ``T`` from then on."""
    return start + (full - start) * u / until if u < until else float(full)


@functools.lru_cache(maxsize=1024)
def reshape_lengths(full: int, start: int, multiple_of: int) -> tuple[int, ...]:
    """The lengths into which a sequence of ``full`` tokens splits evenly: multiples of ``multiple_of``, >= ``start``."""
    return tuple(d for d in range(multiple_of, full + 1, multiple_of) if full % d == 0 and d >= start)


def truncate(t: Tensor, dims: tuple[int, ...], length: int) -> Tensor:
    """The first ``length`` entries of ``t`` along each of ``dims``."""
    for dim in dims:
        t = t.narrow(dim, 0, length)
    return t.contiguous()


def split(t: Tensor, dims: tuple[int, ...], length: int) -> Tensor:
    """``t`` of shape (B, ..T..) as (B T / length, ..length..), the pieces of a sample side by side and in order.

    Where the sequence takes two dimensions, as in a mask (B, T, T), the pieces are the blocks on the diagonal.
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
    """``t`` of shape (B, T + 1) as (B T / length, length + 1): each piece ends with the token that the next begins with."""
    return t.unfold(1, length + 1, length).flatten(0, 1).contiguous()


def restart_positions(pieces: Tensor) -> Tensor:
    """Position ids (b, L) whose first run of consecutive numbers starts at 0; runs that start within a piece stay."""
    breaks = (pieces.diff(dim=1) != 1).cumsum(dim=1)
    first_run = torch.cat([torch.ones_like(breaks[:, :1], dtype=torch.bool), breaks == 0], dim=1)
    return torch.where(first_run, pieces - pieces[:, :1], pieces)


def unblind(mask: Tensor, dims: tuple[int, ...], *, hidden: float | bool, seen: float | bool) -> Tensor:
    """``mask`` with ``seen`` in each row of the last of ``dims`` that is all ``hidden``: attention would make it NaN.

    Such a row sees all of its keys; in a square mask, only itself.
    """
    blind = (mask == hidden).all(dim=dims[-1], keepdim=True)
    if len(dims) > 1:
        eye = torch.eye(mask.shape[dims[-1]], dtype=torch.bool, device=mask.device)
        blind = blind & eye.reshape([size if dim in dims[-2:] else 1 for dim, size in enumerate(mask.shape)])
    return mask.masked_fill(blind, seen)


@dataclass(frozen=True)
class Sequences:
    """Where a batch holds its sequences.

    Attributes:
        size: the number of samples, B.
        full: their length, T.
        dims: by the tensor's id, the dimensions that run along the sequence.
        names: by the tensor's id, its own key, field or position.
        whole: the other tensors that have one entry for each sample, as text.
        shifted: the batch is one tensor (B, T + 1) of which the module makes inputs and targets by itself.
    """

    size: int
    full: int
    dims: dict[int, tuple[int, ...]]
    names: dict[int, str]
    whole: list[str]
    shifted: bool


def sequence_dims(shape: Sequence[int], full: int) -> tuple[int, ...]:
    """The dimensions along the sequence in (B, T), (B, T, D), (B, T, T), (B, 1, 1, T), (B, 1, T, T); () in all else."""
    first = next((dim for dim, size in enumerate(shape) if dim > 0 and size != 1), None)
    if first is None or shape[first] != full:
        return ()
    return tuple(dim for dim, size in enumerate(shape) if dim >= first and size == full)


def find_sequences(batch: Any, keys: Sequence[str | int] | None, multiple_of: int) -> Sequences:
    """Find the sequences of a batch of any make.

    Without ``keys``, T is the length of the batch's integer tensors (B, T), and each tensor of B samples is looked at for
    dimensions of that length.

    Raises:
        ValueError: if there are none, if they have several lengths, or if ``keys`` name no tensor; with what was found.
    """
    named = tensors(batch)
    listed = ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in named) or "no tensors"
    mend = (
        "Say by keys= which tensors have the sequence in dimension 1: by their names in a dict or dataclass, such as"
        " keys=['input_ids', 'labels'], or by their positions in a tuple, such as keys=[0, 1]."
    )
    if keys is None:
        size = num_samples(batch)
        chosen = [t for _, t in named if t.ndim == 2 and t.shape[0] == size and _is_integer(t)]
        if not chosen:
            raise ValueError(f"{WHO}: found no integer tensor of shape (B, T) in the batch: {listed}. {mend}")
    else:
        by_key = [[t for path, t in named if _matches(path, key)] for key in keys]
        chosen = [t for found in by_key for t in found]
        missing = [key for key, found in zip(keys, by_key, strict=True) if not found]
        if missing or any(t.ndim < 2 for t in chosen):
            what = f"{missing} are not in the batch" if missing else "they name tensors with fewer than two dimensions"
            raise ValueError(f"{WHO}(keys={list(keys)}): {what}; it holds {listed}. {mend}")
        size = chosen[0].shape[0]
    lengths = sorted({t.shape[1] for t in chosen})
    if len(lengths) > 1 or any(t.shape[0] != size for t in chosen):
        raise ValueError(f"{WHO}: the tensors with a sequence in dimension 1 differ in length, {lengths}: {listed}. {mend}")
    (full,) = lengths
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


def _matches(path: str, key: str | int) -> bool:
    """Whether a tensor at ``path`` lies at the position, or anywhere under the name, ``key``."""
    if isinstance(key, int):
        return path.startswith(f"[{key}]") or (path == "" and key == 0)
    return f"[{key!r}]" in path or re.search(rf"\.{re.escape(key)}(\W|$)", path) is not None


def shorten(batch: Any, found: Sequences, length: int, *, reshape: bool) -> Any:
    """The batch, of the same make, with sequences of ``length`` tokens: split where ``reshape``, else truncated.

    Raises:
        ValueError: if ``reshape`` and a tensor that has one entry for each sample cannot be split.
    """
    if reshape and found.whole:
        raise ValueError(
            f"{WHO}(mode='reshape'): {', '.join(found.whole)} in the batch hold one entry for each of {found.size} samples"
            " and cannot be split with the sequences. Use mode='truncate', or, if they have the sequence in dimension 1,"
            " name them in keys= with the others."
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
        return unblind(t, dims, hidden=0, seen=1) if name.endswith(("attention_mask", "attn_mask")) else t

    return map_tensors(batch, short)


class SequenceLengthWarmup(Technique):
    """Grow the training sequences from ``start`` to their full length T over the first ``until`` of the budget.

    The target length is ``start + (T - start) u / until`` at the share ``u`` of the budget; it holds over an accumulation
    window. From ``until`` on, ``training_step`` gets the very batch that the loader made. T is that of the batch at hand,
    so that batches of several lengths (bucketing) are each shortened in proportion, and those that cannot be are left
    alone; only the first batch must have something to shorten.

    ``mode="reshape"`` keeps every token: (B, T) becomes (B T / L, L), with L the largest divisor of T that is a multiple of
    ``multiple_of`` and not above the target (the smallest one >= ``start`` until the target reaches the next). The pieces
    of a sample lie side by side. ``position_ids`` start at 0 in each piece, square masks become the blocks on their
    diagonal. Attention does not reach across pieces, and a model that shifts labels by itself (Hugging Face's causal
    ones) predicts no piece's first token. ``mode="truncate"`` keeps the first tokens of each sequence and drops the rest,
    with L the target rounded down to a multiple of ``multiple_of``; it suits sequences padded on the right.

    A batch that is one tensor (B, T + 1), with T a multiple of ``multiple_of`` > 1, is taken to be shifted by the module
    itself: its pieces have L + 1 tokens and overlap by one, so that every pair of input and target is kept once.

    A padding mask named ``..attention_mask`` (1 is seen) or ``..key_padding_mask`` (True is not) that would hide all of a
    piece is opened there, because attention would return NaN; such a piece is padding, whose labels are ignored as before.
    Square masks are opened likewise on the diagonal. In a tuple, where nothing has a name, only masks of ``-inf`` are.

    Logged: ``length``, that of the last step.

    Args:
        start: tokens, >= 1, a multiple of ``multiple_of``, at most T.
        until: fraction of the budget in [0, 1] at which the full length is reached; 0 is plain training.
        multiple_of: tokens, >= 1; lengths below T are multiples of it (hardware is fast at multiples of 8).
        mode: ``"reshape"`` or ``"truncate"``.
        keys: names (dict, dataclass) or positions (tuple, list) of the tensors to cut along dimension 1, where looking at
            shapes does not tell; nothing else is cut then.

    Raises:
        ValueError: if an argument is out of its range; at the first batch, before any weight has changed, if its sequences
            are not found, are shorter than ``start``, or cannot be split.

    Sources:
        Press et al. 2020, arXiv:2012.15832 (short sequences first); Li et al. 2021, arXiv:2108.06084 (linear growth).
    """

    saves: ClassVar[str] = "time and activation memory early in training; stability at large batches and learning rates"
    paper: ClassVar[str] = "Press et al. 2020, arXiv:2012.15832; Li et al. 2021, arXiv:2108.06084"
    constraints: ClassVar[str] = (
        "batches of sequences, found by shape or named by keys=; reshape needs a T with divisors and no per-sample tensors;"
        " every new length recompiles a compiled module"
    )
    control: ClassVar[str] = "the full length throughout, for as many seconds and with the learning rate decayed by tokens"
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        *,
        start: int = 64,
        until: float = 0.3,
        multiple_of: int = 8,
        mode: Literal["reshape", "truncate"] = "reshape",
        keys: list[str | int] | None = None,
    ) -> None:
        for name, value in (("start", start), ("multiple_of", multiple_of)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= 1, a number of tokens.")
        if start % multiple_of:
            below = start - start % multiple_of
            near = f"{below} or {below + multiple_of}" if below else f"{multiple_of}"
            raise ValueError(
                f"{WHO}({start=}, {multiple_of=}): expected a start that is a multiple of multiple_of, as every length below"
                f" the full one is. The nearest: start={near}; or lower multiple_of."
            )
        if not 0.0 <= until <= 1.0:
            raise ValueError(
                f"{WHO}({until=}): expected a fraction of the budget in [0, 1], at which the full length is reached."
            )
        if mode not in ("reshape", "truncate"):
            raise ValueError(f"{WHO}({mode=}): expected 'reshape', which keeps every token, or 'truncate'.")
        if keys is not None and (
            isinstance(keys, str)
            or not isinstance(keys, Sequence)
            or not keys
            or any(isinstance(key, bool) or not isinstance(key, str | int) for key in keys)
        ):
            raise ValueError(
                f"{WHO}({keys=}): expected a list of names or positions, such as ['input_ids', 'labels'] or [0, 1], or None"
                " to look for the sequences."
            )
        self.start = start
        self.until = until
        self.multiple_of = multiple_of
        self.mode = mode
        self.keys = None if keys is None else list(keys)
        self._reset()

    def _reset(self) -> None:
        self._full = 0  # the longest T seen; 0 before the first batch
        self._length = 0
        self._last_step = -1
        self._used: dict[int, list[int]] = {}  # by length: the first step with it, and how many

    @property
    @override
    def neutral(self) -> bool:
        return self.until == 0.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.TRANSFORM, self._link)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._full and self.session.progress.u >= self.until:
            self._count(step, self._full)
            return proceed(batch)
        if self._full:
            found, length, short = self._shorten(batch)
        else:
            found, length, short = self._on_all_ranks(lambda: self._shorten(batch, first=True))
        self._full = max(self._full, found.full)
        self._count(step, length)
        return proceed(short)

    def _shorten(self, batch: Any, *, first: bool = False) -> tuple[Sequences, int, Any]:
        found = find_sequences(batch, self.keys, self.multiple_of)
        if first:
            self._check_possible(found.full)
        length = self.length_of(found.full, self.session.progress.u)
        if length == found.full:
            return found, length, batch
        return found, length, shorten(batch, found, length, reshape=self.mode == "reshape")

    def length_of(self, full: int, u: float) -> int:
        """The length that sequences of ``full`` tokens are given at the share ``u`` of the budget."""
        if u >= self.until or full <= self.start:
            return full
        target = target_length(u, start=self.start, full=full, until=self.until)
        if self.mode == "truncate":
            return int(target) // self.multiple_of * self.multiple_of
        lengths = reshape_lengths(full, self.start, self.multiple_of) or (full,)
        return max((length for length in lengths if length <= target), default=lengths[0])

    def _check_possible(self, full: int) -> None:
        """Raise ``ValueError`` if sequences of ``full`` tokens, the first ones of the run, cannot be shortened."""
        if self.start > full:
            raise ValueError(
                f"{WHO}(start={self.start}): the first batch has sequences of {full} tokens; expected a start of at most"
                " that. Lower start, or take the technique out."
            )
        possible = [d for d in reshape_lengths(full, 1, self.multiple_of) if d < full]
        if self.mode == "truncate" or self.start == full or any(d >= self.start for d in possible):
            return
        others = [d for d in reshape_lengths(full, 1, 1) if d < full]
        raise ValueError(
            f"{WHO}(start={self.start}, multiple_of={self.multiple_of}, mode='reshape'): the first batch has sequences of"
            f" {full} tokens, which split evenly into no shorter length that is a multiple of {self.multiple_of} and at least"
            f" {self.start}. Possible starts: {possible or 'none'} (with another multiple_of: {others}). Choose one of"
            " them, load sequences of another length, or use mode='truncate'."
        )

    def _on_all_ranks(self, fn: Callable[[], Any]) -> Any:
        """``fn()``; where it raises ``ValueError`` on one rank it does on all, so that none waits for another."""
        result, error = None, None
        try:
            result = fn()
        except ValueError as raised:
            error = str(raised)
        errors = [message for message in self.session.gather(error) if message is not None]
        if errors:
            raise ValueError(errors[0])
        return result

    def _count(self, step: Step, length: int) -> None:
        self._length = length
        if step.global_step != self._last_step:  # micro-batches and scoring passes of one step count once
            self._last_step = step.global_step
            self._used.setdefault(length, [step.global_step, 0])[1] += 1

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"length": self._length}

    @override
    def summary(self) -> str:
        if not self._used:
            return "no step taken"
        used = sorted(self._used.items())
        told = [f"{length} for {steps:,}" for length, (_, steps) in used]
        told[0] += " step" if used[0][1][1] == 1 else " steps"
        length, (first, _) = used[-1]
        if length == self._full == self._length:
            told[-1] = f"{length} from step {first:,} on"
        return ", ".join(told if len(told) <= 6 else [*told[:2], f"({len(told) - 4} more)", *told[-2:]])

    @override
    def state_dict(self) -> dict[str, Any]:
        used = {length: list(counts) for length, counts in self._used.items()}
        return {"full": self._full, "length": self._length, "last_step": self._last_step, "used": used}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._full, self._length = state_dict["full"], state_dict["length"]
        self._last_step = state_dict["last_step"]
        self._used = {length: list(counts) for length, counts in state_dict["used"].items()}
