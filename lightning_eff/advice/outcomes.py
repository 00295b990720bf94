"""Results of trials, and of the stack that they add up to."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_eff.advice._running.measuring import Track
from lightning_eff.advice._running.subject import Change
from lightning_eff.advice.intervals import BATCHES, EXACT, PRECISION, Numbers, keeps_numbers, speed_up, tolerance
from lightning_eff.advice.looking import View
from lightning_eff.advice.trials import Trial
from lightning_eff.bench.reports.intervals import Interval

UNKNOWN = 1.1  #: the upper end of an interval, above which a gain that matters is not excluded
GAIN = 1.02  #: a speed-up below is no gain that would be worth a change
OTHER = "other numbers"  #: a change that should be exact, and whose loss or gradients differ by more than rounding


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        trial: which.
        speed: how many times as fast as the baseline; None where it was not measured.
        kind: how it affects numbers, as seen.
        loss: relative difference of the first step's loss.
        gradients: relative difference of the first step's gradients.
        noisy: two plain runs differ by more than rounding, so these differences say nothing.
        bytes: of parameters, gradients, optimizer states and activations, over the baseline's.
        pays_after: batches after which the seconds of its start have paid for themselves; None where its start costs little.
        start_seconds: that its start and first step take more than the baseline's.
        planned: batches of the whole run; None where it has no end.
        error: why it was not measured, or "".
        notes: what its technique said.
        settings: what it chose.
    """

    trial: Trial
    speed: Interval | None = None
    kind: str = EXACT
    loss: float = 0.0
    gradients: float = 0.0
    noisy: bool = False
    bytes: float = 1.0
    pays_after: int | None = None
    start_seconds: float = 0.0
    planned: int | None = None
    error: str = ""
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def faster(self) -> bool:
        """Whether its interval lies above 1, by enough to matter."""
        return self.speed is not None and self.speed.low > 1 and self.speed.estimate >= GAIN

    @property
    def slower(self) -> bool:
        """Whether its interval lies below 1."""
        return self.speed is not None and self.speed.high < 1

    @property
    def undecided(self) -> bool:
        """Whether its interval is too wide to exclude a gain that would matter."""
        return self.speed is not None and not self.faster and self.speed.low < 1 and self.speed.high > UNKNOWN

    @property
    def near(self) -> bool:
        """Whether more turns may still show that it makes the run faster, so that it belongs into a recipe."""
        able = self.kind == EXACT and self.trial.recipe and not self.trial.late and not self.error
        return (
            able and self.speed is not None and not self.faster and self.speed.estimate > 1 and self.speed.high > GAIN
        )

    @property
    def pays(self) -> bool:
        """Whether the run is long enough for the seconds of its start."""
        return self.pays_after is None or self.planned is None or self.pays_after < self.planned

    def count_start(self, saved: float) -> None:
        """Set the batches after which its start has paid for itself, with so many seconds saved per batch."""
        pays = self.start_seconds > 0 and saved > 0 and self.faster
        self.pays_after = math.ceil(self.start_seconds / saved) if pays else None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        own = {**asdict(self), "trial": self.trial.name, "reason": self.trial.reason, "cost": self.trial.cost}
        return {**own, "change": self.trial.change.record(), "code": self.trial.code, "faster": self.faster}


def closest(outcomes: Iterable[Outcome], count: int) -> list[Outcome]:
    """The outcomes nearest to a gain, the best first; only those that can be measured beside the first.

    Trials of loaders and trials with a slow first step are each measured apart.

    Args:
        outcomes: of all trials.
        count: of outcomes, at most.
    """
    near = sorted((one for one in outcomes if one.near), key=lambda one: -one.speed.estimate)  # pyright: ignore[reportOptionalMemberAccess]
    kinds = [(one.trial.group == "loader", one.trial.slow) for one in near]
    return [one for one, kind in zip(near, kinds, strict=True) if kind == kinds[0]][:count]


def judged(
    trial: Trial, baseline: Track, own: Track, precision: str, noise: float, planned: int | None = None
) -> Outcome:
    """The outcome of a trial, from its run and the baseline's run in the same group.

    Args:
        trial: which.
        baseline: the baseline's run in the same group.
        own: its run.
        precision: of the baseline.
        noise: of gradients, between two runs of the baseline.
        planned: batches of the whole run; None where it has no end.
    """
    found = Outcome(trial, planned=planned, error=own.error, notes=own.notes, settings=own.settings)
    if own.error and not own.turns:
        return found
    found.speed = speed_up(baseline.turns, own.turns, trial.unit)
    if found.speed is None:
        found.error = own.error or "there was no time to measure it"
        return found
    found.kind, found.noisy = trial.kind, noise > tolerance(precision)
    if baseline.numbers is not None and own.numbers is not None:
        found.loss, found.gradients = baseline.numbers.differences(own.numbers)
        if trial.kind == EXACT and not keeps_numbers(found.loss, found.gradients, precision, noise):
            found.kind = OTHER
    found.bytes = own.bytes / baseline.bytes if baseline.bytes and own.bytes else 1.0
    extra = own.start_seconds + own.first_seconds - baseline.start_seconds - baseline.first_seconds
    if extra > max(1.0, 5 * baseline.step_seconds):
        found.start_seconds = extra
        found.count_start(baseline.step_seconds - own.step_seconds)
    return found


@dataclass
class Stack:
    """Changes that were measured together.

    Attributes:
        trials: in the order in which they were added.
        speed: against the baseline, on new turns.
        bytes: as :class:`Outcome` has it.
        loss: as :class:`Outcome` has it.
        gradients: as :class:`Outcome` has it.
        noisy: as :class:`Outcome` has it.
        view: where its time goes; None where that was not looked at.
        memory: bytes by kind, of the baseline and of the stack in the same group of runs.
        tried: what was tried for it, in sentences.
    """

    trials: list[Trial] = field(default_factory=list)
    speed: Interval | None = None
    bytes: float = 1.0
    loss: float = 0.0
    gradients: float = 0.0
    noisy: bool = False
    view: View | None = None
    memory: tuple[Mapping[str, int], Mapping[str, int]] | None = None
    tried: list[str] = field(default_factory=list)

    @property
    def change(self) -> Change:
        """All its changes."""
        found = Change()
        for trial in self.trials:
            found = found.plus(trial.change)
        return found

    @property
    def measured(self) -> Change:
        """All its changes, as they are measured."""
        found = Change()
        for trial in self.trials:
            found = found.plus(trial.tried)
        return found

    @property
    def gains(self) -> bool:
        """Whether it is faster than the baseline."""
        return bool(self.trials) and self.speed is not None and self.speed.low > 1 and self.speed.estimate >= GAIN

    def compare(self, baseline: Track, own: Track) -> None:
        """Take the figures of a fresh measurement."""
        self.speed = speed_up(baseline.turns, own.turns)
        self.memory = baseline.memory, own.memory
        if baseline.bytes and own.bytes:
            self.bytes = own.bytes / baseline.bytes
        if baseline.numbers is not None and own.numbers is not None:
            self.loss, self.gradients = baseline.numbers.differences(own.numbers)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "trials": [trial.name for trial in self.trials],
            "speed": None if self.speed is None else asdict(self.speed),
            "bytes": self.bytes,
            "loss": self.loss,
            "gradients": self.gradients,
            "tried": self.tried,
            "trainer": self.change.record(),
        }


def noise_between(first: Numbers | None, second: Numbers | None) -> float:
    """The difference of gradients between two runs of the baseline; 0 where it is not known."""
    if first is None or second is None:
        return 0.0
    found = first.differences(second)[1]
    return found if math.isfinite(found) else 0.0


def in_words(kind: str, loss: float, gradients: float, *, noisy: bool = False) -> str:
    """How a change affects numbers, with the figures. With ``noisy``, two plain runs differ as much."""
    if loss == gradients == 0.0 and kind == EXACT:
        return "bit-equal"
    if kind == BATCHES:
        return "other batches"
    if noisy:
        return "not known: plain runs differ, too"
    figures = f"loss {_small(loss)}, gradients {_small(gradients)}"
    return f"{ {EXACT: 'equal up to rounding', PRECISION: 'rounds'}.get(kind, 'differs') } ({figures})"


def _small(value: float) -> str:
    return "not comparable" if math.isinf(value) else "0" if value == 0 else f"{value:.0e}"


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without numbers that JSON does not have."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): cleaned(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [cleaned(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value if isinstance(value, str | int | float | bool | type(None)) else str(value)

    return cleaned(record)
