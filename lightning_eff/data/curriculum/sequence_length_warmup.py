"""Sequence-length warm-up: train on short sequences first (Press et al. 2020, Shortformer; Li et al. 2021)."""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._arguments.kinds import Alias, Count, Fraction
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._tokens.sequences import Sequences, find_sequences, shorten
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.curriculum._sizes import SizesUsed

WHO = "SequenceLengthWarmup"


def target_length(u: float, *, start: int, full: int, until: float) -> float:
    """Compute ``l(u) = start + (T - start) u / until`` for ``u < until``, and the full length ``T`` from then on."""
    return start + (full - start) * u / until if u < until else float(full)


@functools.lru_cache(maxsize=1024)
def reshape_lengths(full: int, start: int, multiple_of: int) -> tuple[int, ...]:
    """List the lengths that ``full`` tokens split into evenly: multiples of ``multiple_of`` from ``start`` on."""
    return tuple(d for d in range(multiple_of, full + 1, multiple_of) if full % d == 0 and d >= start)


def _short_throughout(technique: "SequenceLengthWarmup") -> dict[str, Callback]:
    """Train at the first length for the whole run."""
    if technique.neutral:
        return {}
    return {
        f"{technique.start} token{'s' * (technique.start > 1)} throughout": ShortSequences(
            start=technique.start, multiple_of=technique.multiple_of, mode=technique.mode, keys=technique.keys
        )
    }


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are not sequences"
    if profile.sequence_length < 4 * _MULTIPLE:
        return f"sequences of {profile.sequence_length} tokens are too short to begin with fewer"
    return None


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Turn ``start`` from a fraction of the full length into tokens, rounded down to a multiple of 8 (at least 8)."""
    start = int(values["start"] * (profile.sequence_length or 0))
    return cls(**{**values, "start": max(start - start % _MULTIPLE, _MULTIPLE), "multiple_of": _MULTIPLE})


_MULTIPLE = 8


class SequenceLengthWarmup(Technique):
    """Train on short sequences first, and grow them to their full length.

    The target length is ``start + (T - start) u / until`` at the used fraction ``u`` of the budget, with ``T`` the length
    of the batch at hand. It stays the same within an accumulation window. From ``until`` on, batches are the loader's own.
    Batches of several lengths (bucketing) are each shortened in proportion. Batches that cannot be shortened stay as they
    are, except that the first batch must be one that can.

    Use it for transformers, whose steps on short sequences cost less time and memory, and to stabilize training at large
    batches and learning rates. Every new length recompiles a compiled module.

    ``mode="reshape"`` keeps every token: (B, T) becomes (B T / L, L). ``L`` is the largest divisor of ``T`` that is a multiple
    of ``multiple_of`` and not above the target, or the smallest one from ``start`` on before the target reaches it. The
    pieces of a sample are consecutive rows. ``position_ids`` start at 0 in each piece, and square masks become the blocks
    on their diagonal. Attention does not reach across pieces. A model that shifts labels itself (such as Hugging Face's
    causal models) does not predict a piece's first token.

    ``mode="truncate"`` keeps the first ``L`` tokens of each sequence and drops the rest. ``L`` is the target rounded down to a
    multiple of ``multiple_of``. It suits sequences with padding on the right.

    A batch that is one tensor (B, T + 1), with ``T`` a multiple of ``multiple_of`` > 1, is taken to be shifted by the module
    itself. Its pieces have ``L + 1`` tokens and overlap by one, so every pair of input and target is kept once.

    A padding mask that would hide a whole piece would make attention return NaN, so it is opened there. The piece is padding,
    and its labels are ignored as before. This applies to masks named ``..attention_mask`` (1 is visible) or
    ``..key_padding_mask`` (True is hidden), to square masks (on the diagonal), and within a tuple, where nothing has a name, to
    masks with ``-inf``.

    It logs ``length`` (the sequence length of the last step).

    Args:
        start: the number of tokens per sequence at the start, a multiple of ``multiple_of`` and at most ``T``. Also accepted as
            ``min_seq_length``.
        until: the fraction of the budget at which the full length is reached. 0 is plain training. Also accepted as
            ``duration``.
        multiple_of: the number of tokens that lengths below ``T`` are multiples of. Hardware is fast at multiples of 8. Also
            accepted as ``step_size``.
        mode: how to shorten sequences: ``"reshape"`` keeps every token, ``"truncate"`` drops the rest of each sequence.
        keys: the only tensors to cut along dimension 1, by name (dict, dataclass) or position (tuple, list). Give them if the
            sequences are not found by their shape.

    Raises:
        ValueError: for a value out of range. At the first batch, before any weight has changed, if its sequences are not found,
            are shorter than ``start``, or cannot be split.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SequenceLengthWarmup(64, until=0.3)])

    References:
        Press et al. 2020, "Shortformer: Better Language Modeling using Shorter Inputs", arXiv:2012.15832. Li et al. 2021,
        "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models", arXiv:2108.06084
        (linear growth).
    """

    saves = "time and activation memory early in training; stability at large batches and learning rates"
    paper = "Press et al. 2020, arXiv:2012.15832; Li et al. 2021, arXiv:2108.06084"
    constraints = (
        "needs batches of sequences, found by shape or named by keys=; reshape needs a T with divisors and no per-sample"
        " tensors; every new length recompiles a compiled module"
    )
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace(
        {
            "start": Choice((0.125, 0.25, 0.5)),  # of the full length
            "until": Uniform(0.1, 0.8),
            "mode": Choice(("reshape", "truncate")),
        },
        _pointless,
        _from_shares,
    )
    control = Control("the first length throughout, validated at the full one", _short_throughout)
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0}
    stage = Stage.TRANSFORM

    def __init__(
        self,
        start: Annotated[int, Count(), Alias("min_seq_length")] = 64,
        *,
        until: Annotated[float, Fraction(), Alias("duration")] = 0.3,
        multiple_of: Annotated[int, Count(), Alias("step_size")] = 8,
        mode: Literal["reshape", "truncate"] = "reshape",
        keys: Annotated[
            list[str | int] | None, BatchKeys(hint="For example ['input_ids', 'labels'] or [0, 1].")
        ] = None,
    ) -> None:
        if start % multiple_of:
            below = start - start % multiple_of
            near = f"{below} or {below + multiple_of}" if below else f"{multiple_of}"
            raise ValueError(
                f"{WHO}({start=}, {multiple_of=}): start must be a multiple of multiple_of. Use start={near}, or a smaller"
                " multiple_of."
            )
        self.start = start
        self.until = until
        self.multiple_of = multiple_of
        self.mode: Literal["reshape", "truncate"] = mode
        self.keys = keys

    def _reset(self) -> None:
        self._full = 0  # the longest T seen, 0 before the first batch
        self._length = 0
        self._used = SizesUsed()  # by length

    @property
    @override
    def changes_shapes(self) -> bool:
        return not self.neutral

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._full and self.session.progress.u >= self.until:
            self._count(step, self._full)
            return proceed(batch)
        if self._full:
            found, length, short = self._shorten(batch)
        else:
            found, length, short = on_all_ranks(self.session, lambda: self._shorten(batch, first=True))
        self._full = max(self._full, found.full)
        self._count(step, length)
        return proceed(short)

    def _shorten(self, batch: Any, *, first: bool = False) -> tuple[Sequences, int, Any]:
        found = find_sequences(batch, self.keys, self.multiple_of, who=WHO)
        if first:
            self._check_possible(found.full)
        length = self.length_of(found.full, self.session.progress.u)
        if length == found.full:
            return found, length, batch
        return found, length, shorten(batch, found, length, reshape=self.mode == "reshape", who=WHO)

    def length_of(self, full: int, u: float) -> int:
        """The length that sequences of ``full`` tokens get at the used fraction ``u`` of the budget."""
        if u >= self.until or full <= self.start:
            return full
        target = target_length(u, start=self.start, full=full, until=self.until)
        if self.mode == "truncate":
            return int(target) // self.multiple_of * self.multiple_of
        lengths = reshape_lengths(full, self.start, self.multiple_of) or (full,)
        return max((length for length in lengths if length <= target), default=lengths[0])

    def _check_possible(self, full: int) -> None:
        """Raise ``ValueError`` if the run's first sequences, of ``full`` tokens, cannot be shortened."""
        if self.start > full:
            raise ValueError(
                f"{WHO}(start={self.start}): the first batch has sequences of only {full} tokens. Use a smaller start, or"
                f" remove {WHO}."
            )
        possible = [d for d in reshape_lengths(full, 1, self.multiple_of) if d < full]
        if self.mode == "truncate" or self.start == full or any(d >= self.start for d in possible):
            return
        others = [d for d in reshape_lengths(full, 1, 1) if d < full]
        fits = f"start={_listed(possible)}, or " if possible else ""
        raise ValueError(
            f"{WHO}(start={self.start}, multiple_of={self.multiple_of}, mode='reshape'): the first batch has sequences of"
            f" {full} tokens, which do not split evenly into lengths of at least {self.start} that are multiples of"
            f" {self.multiple_of}. Use {fits}multiple_of=1 with start={_listed(others)}, or mode='truncate'."
        )

    def _count(self, step: Step, length: int) -> None:
        self._length = length
        self._used.count(step, length)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"length": self._length}

    @override
    def summary(self) -> str:
        at_full = self._full == self._length
        return self._used.summary(str, final=self._full if at_full else None, in_order=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"full": self._full, "length": self._length, **self._used.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._full, self._length = state_dict["full"], state_dict["length"]
        self._used.load_state_dict(state_dict)


def _listed(lengths: list[int]) -> str:
    return " or ".join(map(str, lengths[-5:]))


class ShortSequences(SequenceLengthWarmup):
    """Train at the first length of :class:`SequenceLengthWarmup` throughout, as its control. It is not exported.

    Validation, test and prediction use the full length. The arguments are those of the warm-up.

    Args:
        start: the sequence length.
        multiple_of: the number of tokens that ``start`` is a multiple of.
        mode: how to shorten sequences.
        keys: the tensors to cut, by name or position.

    Raises:
        ValueError: as the warm-up does.
    """

    saves = "time and activation memory throughout"
    search_space = None
    control = Control("itself the control of SequenceLengthWarmup")
    needs_budget: ClassVar[bool] = False

    def __init__(
        self,
        *,
        start: int,
        multiple_of: int = 8,
        mode: Literal["reshape", "truncate"] = "reshape",
        keys: list[str | int] | None = None,
    ) -> None:
        super().__init__(start=start, until=1.0, multiple_of=multiple_of, mode=mode, keys=keys)
        self.until = math.inf  # never reached, not even at u = 1

    @property
    @override
    def changes_shapes(self) -> bool:
        return False
