"""Proposes the next trial with Optuna's TPE sampler, as a function of the earlier trials."""

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_eff._core._lightning.extras import missing
from lightning_eff._core.search_space import Choice, Integer, Range, SearchSpace
from lightning_eff.tune.config import Choices
from lightning_eff.tune.inspection.probing import usual
from lightning_eff.tune.proposals.ranges import anywhere, code, near, suggest
from lightning_eff.tune.space import Space

KINDS = ("baseline", "recipes")
FACTOR = 3  # between successive budgets, and between the numbers of trials at them
RUNGS = (1, FACTOR, FACTOR**2)  # budgets in ninths of the whole: a ninth, a third, all
USED = Choice((False, True))
STEPPING = "lightning_eff.optim."  # the package of techniques that change the optimizer step
PRIOR = 0.1  # weight of the prior: with Optuna's default of 1, too many techniques would be combined


@dataclass
class Trial:
    """One trial, active or ended.

    Attributes:
        kind: "baseline" or "recipes".
        number: its number among its kind, from 0.
        place: its place in the order of all trials. A trial without a run has the place of the next trial with one.
        parameters: the parameters of the sampler, by name.
        choices: the choices for these parameters.
        state: "running", "complete" (it had the whole budget) or "pruned".
        values: the target by rung, one of ``RUNGS``, as far as it came.
        peak_bytes: the largest peak memory of its runs. None if nothing ran.
        why: the reason for its end.
        refused: whether these techniques cannot train here at all.
        crashed: whether it did not train with these settings.
        free: whether it was refused before anything ran.
        ended: the seconds of the search at its end.
    """

    kind: str
    number: int
    place: int
    parameters: dict[str, Any]
    choices: Choices
    state: str = "running"
    values: dict[int, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    why: str | None = None
    refused: bool = False
    crashed: bool = False
    free: bool = False
    ended: float | None = None

    @property
    def value(self) -> float | None:
        """The target at the whole budget. None if it did not come so far."""
        return self.values[RUNGS[-1]] if self.state == "complete" else None

    def record(self) -> dict[str, Any]:
        """Return the trial as JSON."""
        return {**vars(self), "choices": self.choices.record()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Trial":
        """Read a trial from JSON."""
        choices = Choices.of(record["choices"])
        values = {int(rung): value for rung, value in record["values"].items()}
        return cls(**{**record, "choices": choices, "values": values})


def require_extra() -> Any:
    """Return Optuna, which only a search needs.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing("lightning-eff tune", str(error.name), "tune"), name=error.name) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def is_promoted(value: float, others: Iterable[float], mode: str) -> bool:
    """Whether a trial continues at the next budget, because it is in the best third of the trials at this one.

    If there are fewer than three, the best continues (Li et al. 2020, "A System for Massively Parallel Hyperparameter
    Tuning").

    Args:
        value: its own target.
        others: the targets of the earlier trials.
        mode: "min" or "max".
    """
    every = sorted([value, *others], reverse=mode == "max")
    last = every[max(len(every) // FACTOR, 1) - 1]
    return value <= last if mode == "min" else value >= last


def refreshed(
    leading: Choices, best: Choices, baselines: Iterable[Choices], recipes: Iterable[Choices]
) -> Choices | None:
    """Return the leading recipe with the baseline's best settings, if it has settings of an earlier baseline trial.

    A new recipe gets the best settings that the baseline has at that time. The leading recipe is often an early one. Without
    a second chance it would compete with a baseline that was tuned for longer.

    Args:
        leading: the best recipe so far.
        best: the baseline's best choices so far.
        baselines: the choices of all baseline trials.
        recipes: the choices of all recipe trials.

    Returns:
        None if the recipe has its own settings, or these choices were already tried.
    """
    again = Choices(best.own, leading.techniques)
    borrowed = any(leading.own == one.own for one in baselines)
    return again if borrowed and again.key not in {one.key for one in recipes} else None


class Proposer:
    """Proposes trials: first at random, then with Optuna. The same history gives the same proposal.

    Args:
        space: the search space.
        mode: "min" or "max".
        seed: the seed of everything that is drawn.
    """

    def __init__(self, space: Space, mode: str, seed: int) -> None:
        self._optuna = require_extra()
        self.space, self.mode, self.seed = space, mode, seed
        self._ranges = {
            kind: {name: _distribution(self._optuna, what) for name, what in self._parts(kind)} for kind in KINDS
        }

    def _parts(self, kind: str) -> list[tuple[str, Range]]:
        parts: list[tuple[str, Range]] = [(f"own.{one.name}", one.range) for one in self.space.own]
        for name, one in self.space.techniques.items() if kind == "recipes" else ():
            parts.append((f"use.{name}", USED))
            parts += [(f"{name}.{key}", what) for key, what in one.space.settings.items()]
        return parts

    def proposed(
        self, kind: str, over: Sequence[Trial], under_way: Sequence[Trial], start: Choices | None
    ) -> tuple[dict[str, Any], Choices]:
        """Return the parameters of the next trial of a kind, and its choices.

        Args:
            kind: the kind of the trial.
            over: the trials of this kind with known results.
            under_way: the trials without. The sampler avoids their neighbourhood.
            start: choices to try now. The sampler chooses the rest.
        """
        optuna, ranges = self._optuna, self._ranges[kind]
        history = sorted([*over, *under_way], key=lambda trial: trial.number)
        hidden = {trial.number for trial in under_way}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experimental arguments
            study = optuna.create_study(
                direction="minimize" if self.mode == "min" else "maximize",
                sampler=optuna.samplers.TPESampler(
                    seed=self.seed * 1_000_003 + len(history),
                    n_startup_trials=0,
                    multivariate=True,
                    group=True,
                    constant_liar=True,
                    prior_weight=PRIOR,
                    warn_independent_sampling=False,
                ),
            )
            for trial in history:
                study.add_trial(_frozen(optuna, trial, ranges, running=trial.number in hidden))
            if start is not None:
                study.enqueue_trial(self.parameters(start))
            asked = study.ask()
            choices = self._suggested(kind, asked)
        return dict(asked.params), choices

    def _suggested(self, kind: str, trial: Any) -> Choices:
        own = {one.name: suggest(trial, f"own.{one.name}", one.range) for one in self.space.own}
        techniques: dict[str, dict[str, Any]] = {}
        for name, one in self.space.techniques.items() if kind == "recipes" else ():
            if suggest(trial, f"use.{name}", USED):
                settings = one.space.settings
                techniques[name] = {key: suggest(trial, f"{name}.{key}", what) for key, what in settings.items()}
        return Choices(own, techniques)

    def parameters(self, choices: Choices) -> dict[str, Any]:
        """Return the sampler's parameters for these choices."""
        found = {f"own.{o.name}": code(o.range, choices.own[o.name]) for o in self.space.own if o.name in choices.own}
        if not choices.techniques:
            return found
        for name, one in self.space.techniques.items():
            found[f"use.{name}"] = code(USED, name in choices.techniques)
            for key, value in choices.techniques.get(name, {}).items():
                found[f"{name}.{key}"] = code(one.space.settings[key], value)
        return found

    def drawn(self, kind: str, number: int, best: Choices | None, refused: Mapping[frozenset[str], str]) -> Choices:
        """Return the choices of one of the first trials.

        The baseline begins with the unchanged config, then draws at random. Recipes use the baseline's best settings. They
        begin with the techniques that gained in earlier measurements (:meth:`Candidate.expected`). The best comes alone, in
        each of its variants (:attr:`Choice.each`). Then it is combined with the next one, the next two and so on. Each of the
        others follows alone. A combination has at most one technique that changes the optimizer step, because these seek the
        same gain. Techniques that lost in earlier measurements are drawn less often.

        Args:
            kind: the kind of the trial.
            number: its number among its kind.
            best: the baseline's best choices so far.
            refused: the combinations that cannot train.
        """
        draw = random.Random(f"{self.seed} {kind} {number}")
        as_it_is = {one.name: near(one.range, one.value) for one in self.space.own}
        if kind == "baseline":
            return Choices(as_it_is if number == 0 else {one.name: anywhere(draw, one.range) for one in self.space.own})
        names = list(self.space.techniques)
        paying = self._paying()
        if number < len(paying):  # the caller skips those that cannot train
            stack, kinds = paying[number]
            return self._usual(stack, best, as_it_is, kinds)
        draw.shuffle(names)
        stack = []
        size = draw.randint(1, min(2, self.space.most))
        cost = {name: m for name, m in self._expected().items() if m < 1}
        late = {name for name, measured in cost.items() if draw.random() > measured}
        for name in sorted(names, key=lambda one: one in late):
            wanted = {*stack, name}
            if self.space.conflict(wanted) is None and not any(known <= wanted for known in refused):
                stack.append(name)
            if len(stack) == size:
                break
        return self._usual(stack, best, as_it_is)

    def _usual(
        self,
        stack: Sequence[str],
        best: Choices | None,
        as_it_is: Mapping[str, Any],
        kinds: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Choices:
        """Return techniques with middle settings, or these variants of them, and the baseline's best settings."""
        own, kinds = best.own if best else as_it_is, kinds or {}
        return Choices(
            dict(own), {name: {**usual(self.space.techniques[name]), **kinds.get(name, {})} for name in stack}
        )

    def _expected(self) -> dict[str, float]:
        """Return each technique's expected speed-up on runs like this one."""
        return {name: one.expected(self.space.profile) for name, one in self.space.techniques.items()}

    def _paying(self) -> list[tuple[list[str], dict[str, dict[str, Any]]]]:
        """Return the first combinations of a search, with the variants of their techniques.

        They use techniques that gained in earlier measurements, the best ones first.
        """
        measured = self._expected()
        alone = sorted((name for name in measured if measured[name] > 1), key=lambda name: -measured[name])
        stepping = [name for name in alone if self.space.techniques[name].cls.__module__.startswith(STEPPING)]
        together: list[str] = []
        for name in (one for one in alone if one not in stepping[1:]):
            if len(together) < self.space.most and self.space.conflict([*together, name]) is None:
                together.append(name)
        single = {
            name: [([name], {name: kind}) for kind in _kinds(self.space.techniques[name].space)] for name in alone
        }
        return [
            *(stack for name in together[:1] for stack in single[name]),
            *((together[:k], {}) for k in range(2, len(together) + 1)),
            *(stack for name in alone if name not in together[:1] for stack in single[name]),
        ]


def _kinds(space: SearchSpace) -> list[dict[str, Any]]:
    """Return the variants of a technique: each value of the setting that distinguishes them."""
    for name, what in space.settings.items():
        if isinstance(what, Choice) and what.each:
            return [{name: value} for value in what.values]
    return [{}]


def _distribution(optuna: Any, what: Range) -> Any:
    of = optuna.distributions
    if isinstance(what, Choice):
        return of.CategoricalDistribution(tuple(range(len(what.values))))
    if isinstance(what, Integer):
        return of.IntDistribution(what.low, what.high, log=what.log)
    return of.FloatDistribution(what.low, what.high, log=what.log)


def _frozen(optuna: Any, trial: Trial, ranges: Mapping[str, Any], *, running: bool) -> Any:
    """Return a trial as an Optuna trial."""
    states = optuna.trial.TrialState
    state = states.RUNNING if running else states.COMPLETE if trial.state == "complete" else states.PRUNED
    return optuna.trial.create_trial(
        state=state,
        value=None if running else trial.value,
        params=trial.parameters,
        distributions={name: ranges[name] for name in trial.parameters},
        intermediate_values={} if running else trial.values,
    )
