"""Trials beside the baseline: runs in one process take turns, until each ratio is known well enough or time is up."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch

from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff.advice._running.stopwatch import WARM_UP, Enough, Stopwatch
from lightning_eff.advice._running.subject import Change, Subject
from lightning_eff.advice.intervals import LEAST, Numbers, Turn, narrow, speed_up
from lightning_eff.bench.reports.intervals import Interval
from lightning_eff.bench.running.turns import Stopped, in_turns

TURN_SECONDS = 0.15  #: of a turn, about
MOST = 60  #: turns
LONG = 0.15  #: seconds of a batch, from which cold caches hardly matter and one batch is a turn
GRACE = 8.0  #: seconds after the deadline, in which a trial may make its second turn
SLOWER = 0.97  #: a trial whose interval lies below is not measured further


@dataclass
class Track:
    """The measurements of one run.

    Attributes:
        turns: in order.
        numbers: of its first optimizer step.
        memory: bytes by kind.
        start_seconds: up to its first step.
        first_seconds: of its first step.
        error: why it ended early, or "".
        not_finite: the batch, from 1, at which its loss was seen not to be finite; 0 if it never was.
        notes: what its techniques said.
        settings: what a technique chose during the run.
    """

    turns: list[Turn] = field(default_factory=list)
    numbers: Numbers | None = None
    memory: dict[str, int] = field(default_factory=dict)
    start_seconds: float = 0.0
    first_seconds: float = 0.0
    error: str = ""
    not_finite: int = 0
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """The mean time per batch; 0 where no turn was measured."""
        batches = sum(turn.batches for turn in self.turns)
        return math.fsum(turn.seconds for turn in self.turns) / batches if batches else 0.0

    @property
    def bytes(self) -> int:
        """Of parameters, gradients, optimizer states and activations together."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Arm:
    """A run of a group: its change, and the unit in which its time counts."""

    name: str
    change: Change
    unit: str = "sample"


class Referee:
    """Decides after each turn of a run whether it is measured further.

    Args:
        units: of the trials, by their place behind the baseline.
        deadline: by :func:`time.monotonic`.
        thorough: measure also what is clearly slower.
        compiled: a run's first step may have used up the time; it is then measured a little longer.
    """

    def __init__(
        self, units: Sequence[str], deadline: float, *, thorough: bool = False, compiled: bool = False
    ) -> None:
        self._units, self._deadline, self._thorough = units, deadline, thorough
        self._grace, self._few = (3 * GRACE, LEAST) if compiled else (GRACE, 2)
        self.tracks: list[list[Turn]] = [[] for _ in range(len(units) + 1)]
        self.gone: set[int] = set()

    def ratio(self, trial: int) -> Interval | None:
        """The speed-up of a trial so far."""
        return speed_up(self.tracks[0], self.tracks[trial], self._units[trial - 1])

    def go_on(self, me: int) -> bool:
        """Whether run ``me`` is measured further; the baseline, as long as any trial is."""
        if 0 in self.gone:
            return False
        late, very = (time.monotonic() > self._deadline + more for more in (0.0, self._grace))
        if me == 0:
            return len(self.gone) < len(self._units)
        turns = min(len(self.tracks[0]), len(self.tracks[me]))
        found = self.ratio(me)
        slow = found is not None and found.high < SLOWER and not self._thorough
        if (
            (turns >= LEAST and (narrow(found) or slow or late))
            or turns >= MOST
            or very
            or (late and turns >= self._few)
        ):
            self.gone.add(me)
            return False
        return True


def turn_of(step_seconds: float, window: int) -> tuple[int, int]:
    """The batches of a turn that count, and those before them that do not.

    Args:
        step_seconds: of a batch.
        window: batches of an optimizer step.
    """
    if step_seconds > LONG:
        return window, 0
    batches = max(math.ceil(TURN_SECONDS / max(step_seconds, 1e-4)), 2)
    return min(math.ceil(batches / window) * window, max(64, window)), 1


def least_seconds(step_seconds: float, window: int, arms: int) -> float:
    """About how long a group of so many runs takes at least."""
    batches, skip = turn_of(step_seconds, window)
    return arms * (WARM_UP + 1 + 2 * (batches + skip)) * step_seconds


def measure(
    subject: Subject,
    arms: Sequence[Arm],
    *,
    step_seconds: float,
    deadline: float,
    thorough: bool = False,
    compiled: bool = False,
    tell: Callable[[], object] | None = None,
) -> list[Track]:
    """Train the baseline and trials in turns.

    Args:
        subject: the run.
        arms: the trials; the baseline is added in front.
        step_seconds: the time per batch of the baseline, about, which decides the length of a turn.
        deadline: by :func:`time.monotonic`, after which every run ends with its turn.
        thorough: measure also what is clearly slower.
        compiled: a trial compiles in its first step.
        tell: called after each turn.

    Returns:
        The baseline's track, and those of the trials.
    """
    every = [Arm("baseline", Change()), *arms]
    referee = Referee([arm.unit for arm in arms], deadline, thorough=thorough, compiled=compiled)
    batches, skip = turn_of(step_seconds, int(subject.settings.get("accumulate_grad_batches", 1)))
    flags = _flags()

    def task(index: int) -> Callable[[Callable[[], None]], Track]:
        def run(pass_on: Callable[[], None]) -> Track:
            def switch() -> None:
                mine = _flags()
                if tell is not None:
                    tell()
                pass_on()
                _set(mine)

            _set(flags)
            track = Track()
            watch = Stopwatch(batches, lambda: referee.go_on(index), switch, skip=skip)
            watch.turns = track.turns = referee.tracks[index]
            try:
                _fit(subject, every[index].change, watch, track)
            finally:
                referee.gone.add(index)
                track.numbers, track.memory, track.not_finite = watch.numbers, watch.memory, watch.not_finite
                track.start_seconds, track.first_seconds = watch.start_seconds, watch.first_seconds
            return track

        return run

    with redirect_stdout(StringIO()), undisturbed():
        try:
            tracks = in_turns([task(index) for index in range(len(every))], torch.get_num_threads())
        finally:
            _set(flags)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return tracks


def _fit(subject: Subject, change: Change, watch: Stopwatch, track: Track) -> None:
    """One run, until the referee ends it; what goes wrong is kept in ``track``."""
    trainer = None
    try:
        subject.seed()
        built = subject.build(change, [watch])
        trainer = built.trainer
        trainer.fit(built.module, **built.data)
        track.error = "" if track.turns else "the run ended before it could be measured"
    except Enough:
        pass
    except Stopped:
        raise
    except Exception as error:
        track.error = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, AttributeError | KeyError | IndexError | AssertionError | NameError):
            track.error = f"{type(error).__name__}: {track.error}"
    finally:
        if trainer is not None:
            _listen(trainer, track)


def _listen(trainer: Any, track: Track) -> None:
    """Take the settings and notes of the run's techniques."""
    for one in trainer.callbacks:
        if not type(one).__module__.startswith("lightning_eff."):
            continue
        track.notes += [str(text) for text in getattr(one, "_said", ())]
        chosen: Any = getattr(one, "chosen", None)
        if chosen is not None:
            track.settings.update(chosen())
        goal = getattr(one, "_goal", None)
        if type(one).__name__ == "LoaderTuning" and goal is not None:
            track.settings.update({"loader": str(goal)})


def _flags() -> Mapping[str, Any]:
    """Torch's global settings that a run may change, and that others must not see."""
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "nan": torch.is_anomaly_check_nan_enabled(),
    }


def _set(flags: Mapping[str, Any]) -> None:
    torch.set_float32_matmul_precision(flags["matmul"])
    torch.set_default_dtype(flags["dtype"])
    torch.backends.cudnn.benchmark = flags["benchmark"]
    torch.use_deterministic_algorithms(flags["deterministic"], warn_only=flags["warn_only"])
    torch.autograd.set_detect_anomaly(flags["anomaly"], flags["nan"])
