"""The search: Optuna's TPE over the conditional space, and successive halving over budgets; others train."""

import json
import math
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_eff.bench.results import write_json
from lightning_eff.tune.config import Choices
from lightning_eff.tune.probing import usual
from lightning_eff.tune.ranges import anywhere, code, near, suggest
from lightning_eff.tune.space import Space

KINDS = ("baseline", "recipes")
FACTOR = 3  # between budgets, and of trials that one passes on to the next
RUNGS = (1, FACTOR, FACTOR**2)  # shares of the largest: a ninth, a third, all
STARTUP = 10  # trials of each kind that are drawn before the sampler has anything to go by
PRIOR = 0.1  # weight of what is not known yet: at the usual 1, too many techniques would be on at once
FREE = 30  # refusals on end that cost no run, after which a stack is drawn afresh


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        value: the target at its end; None where it did not get there.
        why: the reason where it did not.
        refused: this stack cannot train here at all, with whatever settings.
        seconds: it took, with all that belongs to it.
    """

    value: float | None
    why: str | None = None
    refused: bool = False
    seconds: float = 0.0


class Run(Protocol):
    """Trains what was chosen over a budget of seconds, the rate decayed wholly on it."""

    def __call__(self, choices: Choices, budget: float) -> Outcome: ...


def require_extra() -> Any:
    """Optuna, which only a search needs.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed; a search needs it. Run: pip install 'lightning-eff[tune]'", name=error.name
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Search:
    """Trials of the baseline's own settings and of recipes, as many of one kind as of the other, until time is over.

    A trial runs at a ninth of the budget, then at a third, then at all of it; on each it is held against the others that
    came as far, and goes on if it is in their best third. A search that was interrupted goes on: every run's outcome is on
    disk, and a trial that was under way is taken up again.

    Args:
        space: what may be chosen.
        run: trains a trial.
        folder: for the study and the runs' outcomes.
        mode: "min" or "max".
        budget: seconds of a whole run.
        seconds: of the search, over all times that it is gone on with.
        seed: of all that is drawn.
        jobs: trials at once.
        limit: trials of each kind at most; None for what the time holds.
        tell: called with a line for people after each trial.
    """

    def __init__(
        self,
        space: Space,
        run: Run,
        folder: Path,
        *,
        mode: str,
        budget: float,
        seconds: float,
        seed: int = 0,
        jobs: int = 1,
        limit: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._optuna = require_extra()
        self.space, self.run, self.folder, self.mode = space, run, folder, mode
        self.budget, self.seconds, self.seed, self.jobs, self.limit = budget, seconds, seed, jobs, limit
        self._tell = tell or (lambda line: None)
        (folder / "outcomes").mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        file = folder / "clock.json"
        self._before = json.loads(file.read_text())["seconds"] if file.is_file() else 0.0
        self._began = time.monotonic()
        self._last = 0.0  # seconds of the last trial
        self._stopped = False
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.studies = {
                kind: self._optuna.create_study(
                    storage=storage,
                    study_name=kind,
                    direction="minimize" if mode == "min" else "maximize",
                    load_if_exists=True,
                    pruner=self._optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=FACTOR),
                )
                for kind in KINDS
            }
        self._waiting = [
            (kind, trial.number)
            for kind, study in self.studies.items()
            for trial in study.get_trials(deepcopy=False)
            if trial.state.name in ("RUNNING", "WAITING")
        ]
        self.refused: dict[frozenset[str], str] = {}
        for record in self.trials():
            if record["refused"]:
                self.refused[frozenset(record["choices"]["techniques"])] = record["why"]

    # -- the whole

    @property
    def spent(self) -> float:
        """Seconds of the search so far."""
        return self._before + time.monotonic() - self._began

    def search(self) -> None:
        """Try until the time, or the number of trials, is used up.

        Raises:
            RuntimeError: if no trial of the baseline came to its end.
        """
        kinds = KINDS if self.space.techniques else KINDS[:1]
        pool = ThreadPoolExecutor(self.jobs)
        try:
            for done in [pool.submit(self._work, kinds) for _ in range(self.jobs)]:
                done.result()
        except BaseException:
            self._stopped = True  # what comes of runs that are ended from outside is no outcome
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        if self.best("baseline") is None:
            reasons = [record["why"] for record in self.trials("baseline") if record["why"]]
            raise RuntimeError(
                f"None of the baseline's {len(self.trials('baseline'))} trials came to its end;"
                f" {f'the last said: {reasons[-1]}' if reasons else 'the search was too short'}. Lower the rates that are"
                " tried, in a space file under own: {rate: {low: ..., high: ..., log: true}}, or give more --search."
            )

    def _work(self, kinds: tuple[str, ...]) -> None:
        free = 0
        while True:
            with self._lock:
                if self._stopped:
                    return
                kind, trial = self._next(kinds, drawn=free >= FREE)
                if trial is None:
                    return
            free = 0 if self._trial(kind, trial) else free + 1
            if free >= 2 * FREE:  # whatever is drawn is refused
                return

    def _next(self, kinds: tuple[str, ...], *, drawn: bool) -> tuple[str, Any]:
        if self._waiting:  # of before an interruption
            kind, number = self._waiting.pop(0)
            found = self.studies[kind].get_trials(deepcopy=False)[number]
            return kind, self._optuna.trial.Trial(self.studies[kind], found._trial_id)
        counts = {kind: len(self._counted(kind)) for kind in kinds}
        kind = min(kinds, key=lambda one: counts[one])
        tried = min(self._tried(one) for one in kinds) > 0
        over = self.spent + self._last > self.seconds and tried
        if over or (self.limit is not None and counts[kind] >= self.limit):
            return kind, None
        study = self.studies[kind]
        number = len(study.get_trials(deepcopy=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that groups and priors are experimental
            study.sampler = self._optuna.samplers.TPESampler(
                seed=self.seed * 1_000_003 + number,  # what comes next is a matter of what was, interrupted or not
                n_startup_trials=0,
                multivariate=True,
                group=True,
                constant_liar=self.jobs > 1,
                prior_weight=PRIOR,
                warn_independent_sampling=False,
            )
            if counts[kind] < STARTUP or drawn:
                study.enqueue_trial(self._parameters(self._drawn(kind, number)))
            return kind, study.ask()

    def _counted(self, kind: str) -> list[Any]:
        """Trials that were not refused: of them both kinds have as many."""
        trials = self.studies[kind].get_trials(deepcopy=False)
        return [t for t in trials if not t.user_attrs.get("free", False) and not t.user_attrs.get("refused", False)]

    def _tried(self, kind: str) -> int:
        """Trials for which something ran; those that were known to be refused cost nothing."""
        return sum(not t.user_attrs.get("free", False) for t in self.studies[kind].get_trials(deepcopy=False))

    # -- one trial

    def _trial(self, kind: str, trial: Any) -> bool:
        """Run a trial as far as it gets; whether anything was run for it."""
        began = time.monotonic()
        with self._lock:
            choices = self._suggested(kind, trial)
            trial.set_user_attr("choices", choices.record())
            why = self._known_refusal(kind, choices)
        if why is not None:
            with self._lock:
                trial.set_user_attr("why", why)
                trial.set_user_attr("free", True)
                self.studies[kind].tell(trial, state=self._optuna.trial.TrialState.PRUNED)
            return False
        outcome = Outcome(None)
        pruned = False
        for rung in RUNGS:
            outcome = self._outcome(choices, self.budget * rung / RUNGS[-1])
            if outcome.value is None:
                break
            with self._lock:
                if rung not in self.studies[kind].get_trials(deepcopy=False)[trial.number].intermediate_values:
                    trial.report(outcome.value, rung)
                pruned = rung < RUNGS[-1] and trial.should_prune()
            if pruned:
                break
        with self._lock:
            self._end(kind, trial, choices, outcome, pruned)
            self._last = time.monotonic() - began
            write_json(self.folder / "clock.json", {"seconds": self.spent})
        return True

    def _end(self, kind: str, trial: Any, choices: Choices, outcome: Outcome, pruned: bool) -> None:
        states = self._optuna.trial.TrialState
        if outcome.value is None:
            trial.set_user_attr("why", outcome.why)
            trial.set_user_attr("refused", outcome.refused)
            if outcome.refused and choices.techniques:
                self.refused[frozenset(choices.techniques)] = str(outcome.why)
        elif pruned:
            trial.set_user_attr("why", f"not in the best third at {self._share(trial, kind)} of the budget")
        complete = outcome.value is not None and not pruned
        study = self.studies[kind]
        study.tell(trial, outcome.value if complete else None, state=states.COMPLETE if complete else states.PRUNED)
        best = self.best(kind)
        said = f"{outcome.value:.5g}" if outcome.value is not None else str(outcome.why)
        self._tell(
            f"{kind} {len(self._counted(kind))}: {choices.told()}: {said}{' (left there)' if pruned else ''}; best"
            f" {'none yet' if best is None else format(best['value'], '.5g')}; {self.spent:.0f} s of {self.seconds:.0f} s"
        )

    def _share(self, trial: Any, kind: str) -> str:
        steps = self.studies[kind].get_trials(deepcopy=False)[trial.number].intermediate_values
        return f"1/{RUNGS[-1] // max(steps)}"

    def _outcome(self, choices: Choices, budget: float) -> Outcome:
        """What became of a run: as it is on disk, or as it comes out."""
        file = self.folder / "outcomes" / f"{choices.key}-{budget:g}.json"
        if file.is_file():
            return Outcome(**json.loads(file.read_text()))
        began = time.monotonic()
        outcome = self.run(choices, budget)
        if self._stopped:
            raise InterruptedError("the search was stopped")
        if outcome.value is not None and not math.isfinite(outcome.value):
            outcome = Outcome(None, f"the target is {outcome.value}")
        write_json(file, asdict(outcome) | {"seconds": time.monotonic() - began})
        return outcome

    def _known_refusal(self, kind: str, choices: Choices) -> str | None:
        names = frozenset(choices.techniques)
        if kind == "recipes" and not names:
            return "no technique is on, which is the baseline"
        if len(names) > self.space.most:
            return f"{len(names)} techniques; at most {self.space.most} are tried together"
        clash = self.space.conflict(names)
        if clash is not None:
            return f"{' and '.join(sorted(clash[0]))}: {clash[1]}"
        return next((why for stack, why in self.refused.items() if stack <= names), None)

    # -- choices and Optuna's parameters

    def _suggested(self, kind: str, trial: Any) -> Choices:
        own = {one.name: suggest(trial, f"own.{one.name}", one.range) for one in self.space.own}
        techniques: dict[str, dict[str, Any]] = {}
        for name, one in self.space.techniques.items() if kind == "recipes" else ():
            if trial.suggest_categorical(f"use.{name}", (False, True)):
                settings = one.space.settings
                techniques[name] = {key: suggest(trial, f"{name}.{key}", what) for key, what in settings.items()}
        return Choices(own, techniques)

    def _parameters(self, choices: Choices) -> dict[str, Any]:
        """The parameters that :meth:`_suggested` makes these choices of; what is not chosen is the sampler's."""
        found = {f"own.{o.name}": code(o.range, choices.own[o.name]) for o in self.space.own if o.name in choices.own}
        if not choices.techniques:
            return found
        for name, one in self.space.techniques.items():
            found[f"use.{name}"] = name in choices.techniques
            for key, value in choices.techniques.get(name, {}).items():
                found[f"{name}.{key}"] = code(one.space.settings[key], value)
        return found

    def _drawn(self, kind: str, number: int) -> Choices:
        """A start: the config as it is, then at random; of recipes, few techniques on the baseline's best settings."""
        draw = random.Random(f"{self.seed} {kind} {number}")
        if kind == "baseline":
            own = {one.name: near(one.range, one.value) for one in self.space.own}
            return Choices(own if number == 0 else {one.name: anywhere(draw, one.range) for one in self.space.own})
        best = self.best("baseline")
        own = dict(best["choices"]["own"]) if best else {o.name: near(o.range, o.value) for o in self.space.own}
        names = list(self.space.techniques)
        draw.shuffle(names)
        stack: list[str] = []
        size = draw.randint(1, min(2, self.space.most))
        for name in names:
            wanted = {*stack, name}
            if self.space.conflict(wanted) is None and not any(known <= wanted for known in self.refused):
                stack.append(name)
            if len(stack) == size:
                break
        one = self.space.techniques
        return Choices(own, {name: usual(one[name]) for name in stack})

    # -- what was found

    def trials(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Every trial, in order: its kind, number, choices, state, value, values at each share, and why it ended."""
        found: list[dict[str, Any]] = []
        for name in KINDS if kind is None else (kind,):
            for trial in self.studies[name].get_trials(deepcopy=False):
                attributes = trial.user_attrs
                found.append(
                    {
                        "kind": name,
                        "number": trial.number,
                        "choices": attributes.get("choices", {"own": {}, "techniques": {}}),
                        "state": trial.state.name.lower(),
                        "value": trial.value if trial.state.name == "COMPLETE" else None,
                        "values": {f"1/{RUNGS[-1] // step}": v for step, v in trial.intermediate_values.items()},
                        "why": attributes.get("why"),
                        "refused": attributes.get("refused", False),
                        "free": attributes.get("free", False),
                    }
                )
        return found

    def ranked(self, kind: str) -> list[dict[str, Any]]:
        """The trials that had the whole budget, the best first."""
        whole = [record for record in self.trials(kind) if record["value"] is not None]
        return sorted(whole, key=lambda record: record["value"], reverse=self.mode == "max")

    def best(self, kind: str) -> dict[str, Any] | None:
        """The best of :meth:`ranked`."""
        return next(iter(self.ranked(kind)), None)


def chosen(record: Mapping[str, Any]) -> Choices:
    """The choices of a trial's record."""
    return Choices(record["choices"]["own"], record["choices"]["techniques"])
