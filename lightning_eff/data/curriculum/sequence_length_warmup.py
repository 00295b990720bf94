"""Sequence-length warm-up: train on short sequences first (Press et al. 2020, Shortformer; Li et al. 2021)."""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._tokens.sequences import Sequences, check_shortening, find_sequences, shorten
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "SequenceLengthWarmup"


def target_length(u: float, *, start: int, full: int, until: float) -> float:
    """``l(u) = start + (T - start) u / until`` for ``u < until``, and the full length ``T`` from then on."""
    return start + (full - start) * u / until if u < until else float(full)


@functools.lru_cache(maxsize=1024)
def reshape_lengths(full: int, start: int, multiple_of: int) -> tuple[int, ...]:
    """The lengths into which ``full`` tokens split evenly: multiples of ``multiple_of`` from ``start`` on."""
    return tuple(d for d in range(multiple_of, full + 1, multiple_of) if full % d == 0 and d >= start)


def _short_throughout(technique: "SequenceLengthWarmup") -> dict[str, Callback]:
    """The length at which it starts, for the whole run."""
    if technique.neutral:
        return {}
    return {
        f"{technique.start} token{'s' * (technique.start > 1)} throughout": ShortSequences(
            start=technique.start, multiple_of=technique.multiple_of, mode=technique.mode, keys=technique.keys
        )
    }


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are no sequences"
    if profile.sequence_length < 4 * _MULTIPLE:
        return f"sequences of {profile.sequence_length} tokens are too short to begin with fewer"
    return None


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """``start`` is a share of the full length, down to a multiple of 8 or less."""
    start = int(values["start"] * (profile.sequence_length or 0))
    return cls(**{**values, "start": max(start - start % _MULTIPLE, _MULTIPLE), "multiple_of": _MULTIPLE})


_MULTIPLE = 8


class SequenceLengthWarmup(Technique):
    """Grow the training sequences from ``start`` to their full length T over the first ``until`` of the budget.

    The target length is ``start + (T - start) u / until`` at the share ``u`` of the budget; it holds over an
    accumulation window. From ``until`` on, ``training_step`` gets the very batch that the loader made. T is that of the
    batch at hand, so that batches of several lengths (bucketing) are each shortened in proportion, and those that
    cannot be are left alone; only the first batch must have something to shorten.

    ``mode="reshape"`` keeps every token: (B, T) becomes (B T / L, L), with L the largest divisor of T that is a
    multiple of ``multiple_of`` and not above the target (the smallest one >= ``start`` until the target reaches the
    next). The pieces of a sample lie side by side. ``position_ids`` start at 0 in each piece, square masks become the
    blocks on their diagonal. Attention does not reach across pieces, and a model that shifts labels by itself (Hugging
    Face's causal ones) predicts no piece's first token. ``mode="truncate"`` keeps the first tokens of each sequence and
    drops the rest, with L the target rounded down to a multiple of ``multiple_of``; it suits sequences padded on the
    right.

    A batch that is one tensor (B, T + 1), with T a multiple of ``multiple_of`` > 1, is taken to be shifted by the
    module itself: its pieces have L + 1 tokens and overlap by one, so that every pair of input and target is kept once.

    A padding mask named ``..attention_mask`` (1 is seen) or ``..key_padding_mask`` (True is not) that would hide all of
    a piece is opened there, because attention would return NaN; such a piece is padding, whose labels are ignored as
    before. Square masks are opened likewise on the diagonal. In a tuple, where nothing has a name, only masks of
    ``-inf`` are.

    Logged: ``length``, that of the last step.

    Args:
        start: tokens, >= 1, a multiple of ``multiple_of``, at most T.
        until: fraction of the budget in [0, 1] at which the full length is reached; 0 is plain training.
        multiple_of: tokens, >= 1; lengths below T are multiples of it (hardware is fast at multiples of 8).
        mode: ``"reshape"`` or ``"truncate"``.
        keys: names (dict, dataclass) or positions (tuple, list) of the tensors to cut along dimension 1, where looking
            at shapes does not tell; nothing else is cut then.

    Raises:
        ValueError: if an argument is out of its range; at the first batch, before any weight has changed, if its
            sequences are not found, are shorter than ``start``, or cannot be split.

    Sources:
        Press et al. 2020, arXiv:2012.15832 (short sequences first); Li et al. 2021, arXiv:2108.06084 (linear growth).
    """

    saves: ClassVar[str] = "time and activation memory early in training; stability at large batches and learning rates"
    paper: ClassVar[str] = "Press et al. 2020, arXiv:2012.15832; Li et al. 2021, arXiv:2108.06084"
    constraints: ClassVar[str] = (
        "batches of sequences, found by shape or named by keys=; reshape needs a T with divisors and no per-sample"
        " tensors; every new length recompiles a compiled module"
    )
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = Survey("sequence length warm-up", shen="3.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "start": Choice((0.125, 0.25, 0.5)),  # of the full length
            "until": Uniform(0.1, 0.8),
            "mode": Choice(("reshape", "truncate")),
        },
        _pointless,
        _from_shares,
    )
    control: ClassVar[Control] = Control("the short length throughout, validated at the full one", _short_throughout)
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        start: int = 64,
        *,
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
                f"{WHO}({start=}, {multiple_of=}): expected a start that is a multiple of multiple_of, as every length"
                f" below the full one is. The nearest: start={near}; or lower multiple_of."
            )
        if not 0.0 <= until <= 1.0:
            raise ValueError(
                f"{WHO}({until=}): expected a fraction of the budget in [0, 1], at which the full length is reached."
            )
        check_shortening(mode, keys, who=WHO)
        self.start = start
        self.until = until
        self.multiple_of = multiple_of
        self.mode: Literal["reshape", "truncate"] = mode
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

    @property
    @override
    def changes_shapes(self) -> bool:
        return not self.neutral

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
                f"{WHO}(start={self.start}): the first batch has sequences of {full} tokens; expected a start of at"
                " most that. Lower start, or take the technique out."
            )
        possible = [d for d in reshape_lengths(full, 1, self.multiple_of) if d < full]
        if self.mode == "truncate" or self.start == full or any(d >= self.start for d in possible):
            return
        others = [d for d in reshape_lengths(full, 1, 1) if d < full]
        raise ValueError(
            f"{WHO}(start={self.start}, multiple_of={self.multiple_of}, mode='reshape'): the first batch has sequences"
            f" of {full} tokens, which split evenly into no shorter length that is a multiple of {self.multiple_of} and"
            f" at least {self.start}. Possible starts: {possible or 'none'} (with another multiple_of: {others})."
            " Choose one of them, load sequences of another length, or use mode='truncate'."
        )

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


class ShortSequences(SequenceLengthWarmup):
    """Train at the length at which :class:`SequenceLengthWarmup` starts, throughout: its control, and not exported.

    Validation, test and prediction see the full length.

    Args:
        start: the length, as of the warm-up.
        multiple_of: as of the warm-up.
        mode: as of the warm-up.
        keys: as of the warm-up.

    Raises:
        ValueError: as the warm-up does.
    """

    saves: ClassVar[str] = "time and activation memory throughout"
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = None
    control: ClassVar[Control] = Control("itself the control of SequenceLengthWarmup")
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
        self.until = math.inf  # never reached, also where u = 1

    @property
    @override
    def changes_shapes(self) -> bool:
        return False
