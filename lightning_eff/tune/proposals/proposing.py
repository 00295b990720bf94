"""What a search tries next: Optuna's TPE over the conditional space, as a function of what was tried before."""

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
FACTOR = 3  # between budgets, and of trials that one passes on to the next
RUNGS = (1, FACTOR, FACTOR**2)  # shares of the largest: a ninth, a third, all
USED = Choice((False, True))
STEPPING = "lightning_eff.optim."  # where the techniques stand that change how weights are stepped
PRIOR = 0.1  # weight of what is not known yet: at the usual 1, too many techniques would be on at once


@dataclass
class Trial:
    """One trial, under way or over.

    Attributes:
        kind: of the two.
        number: among its kind, from 0.
        place: in the order in which all trials were begun; of one that cost no run, that of the next which did.
        parameters: of the sampler, by name.
        choices: what they stand for.
        state: "running", "complete" (it had the whole budget) or "pruned".
        values: the target by share of the budget, one of ``RUNGS``, up to where it came.
        peak_bytes: of memory, the most in any of its runs; None where nothing ran.
        why: it ended where it did.
        refused: this stack cannot train here at all.
        crashed: it did not train with these settings.
        free: that was known before anything was run for it.
        ended: seconds of the search when it was over.
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
        """The target at the whole budget; None where it did not come so far."""
        return self.values[RUNGS[-1]] if self.state == "complete" else None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "choices": self.choices.record()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Trial":
        """From JSON."""
        choices = Choices.of(record["choices"])
        values = {int(rung): value for rung, value in record["values"].items()}
        return cls(**{**record, "choices": choices, "values": values})


def require_extra() -> Any:
    """Optuna, which only a search needs.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing("lightning-eff tune", str(error.name), "tune"), name=error.name) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def goes_on(value: float, others: Iterable[float], mode: str) -> bool:
    """Whether a trial passes on to the next budget: it is in the best third of those that came as far, itself included.

    Of fewer than three, the best passes on (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning").

    Args:
        value: its own.
        others: of those that were begun before it.
        mode: "min" or "max".
    """
    every = sorted([value, *others], reverse=mode == "max")
    last = every[max(len(every) // FACTOR, 1) - 1]
    return value <= last if mode == "min" else value >= last


def renewed(
    leading: Choices, best: Choices, baselines: Iterable[Choices], recipes: Iterable[Choices]
) -> Choices | None:
    """The leading recipe on the baseline's best settings, where it still has those of an earlier trial of the baseline's.

    Recipes are drawn on the best settings that the baseline has by then. What leads was mostly drawn early, and would be held
    against a baseline that had more tuning since.

    Args:
        leading: the best recipe so far.
        best: the baseline's best choices so far.
        baselines: what the baseline tried.
        recipes: what recipes tried.

    Returns:
        None where the recipe's settings are its own, or this was tried.
    """
    again = Choices(best.own, leading.techniques)
    borrowed = any(leading.own == one.own for one in baselines)
    return again if borrowed and again.key not in {one.key for one in recipes} else None


class Proposer:
    """Says what a trial tries: at its start by drawing, then by Optuna. The same history gives the same proposal.

    Args:
        space: what may be chosen.
        mode: "min" or "max".
        seed: of all that is drawn.
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
        """The parameters of the next trial of a kind, and what they stand for.

        Args:
            kind: of the trial.
            over: trials of this kind whose outcome is known.
            under_way: those whose outcome is not: what is near to them is avoided.
            start: what is tried in place of what the sampler would say; it chooses what is not in it.
        """
        optuna, ranges = self._optuna, self._ranges[kind]
        history = sorted([*over, *under_way], key=lambda trial: trial.number)
        hidden = {trial.number for trial in under_way}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that groups and priors are experimental
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
        """The parameters that stand for these choices; what is not chosen is the sampler's."""
        found = {f"own.{o.name}": code(o.range, choices.own[o.name]) for o in self.space.own if o.name in choices.own}
        if not choices.techniques:
            return found
        for name, one in self.space.techniques.items():
            found[f"use.{name}"] = code(USED, name in choices.techniques)
            for key, value in choices.techniques.get(name, {}).items():
                found[f"{name}.{key}"] = code(one.space.settings[key], value)
        return found

    def drawn(self, kind: str, number: int, best: Choices | None, refused: Mapping[frozenset[str], str]) -> Choices:
        """A start: the config as it is, then at random; of recipes, few techniques on the baseline's best settings.

        Recipes begin with what was measured to pay, by :meth:`Candidate.expected`: the best alone, in each of its kinds
        (:attr:`Choice.each`), with the next, with the next two, and so on, then each of the others alone. No two of those
        that begin together change how weights are stepped, since they seek the same gain. What was measured to cost is drawn
        less often than the rest.

        Args:
            kind: of the trial.
            number: among its kind.
            best: of the baseline, so far.
            refused: stacks that are known not to train.
        """
        draw = random.Random(f"{self.seed} {kind} {number}")
        as_it_is = {one.name: near(one.range, one.value) for one in self.space.own}
        if kind == "baseline":
            return Choices(as_it_is if number == 0 else {one.name: anywhere(draw, one.range) for one in self.space.own})
        names = list(self.space.techniques)
        paying = self._paying()
        if number < len(paying):  # one that is known not to train is passed over by who asks
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
        """Techniques with settings from the middle of their ranges, or of these kinds, on the baseline's best."""
        own, kinds = best.own if best else as_it_is, kinds or {}
        return Choices(
            dict(own), {name: {**usual(self.space.techniques[name]), **kinds.get(name, {})} for name in stack}
        )

    def _expected(self) -> dict[str, float]:
        """Of each technique, how many times as fast it was on runs like this one."""
        return {name: one.expected(self.space.profile) for name, one in self.space.techniques.items()}

    def _paying(self) -> list[tuple[list[str], dict[str, dict[str, Any]]]]:
        """The stacks that a search begins with, and the kinds of their techniques where they have several.

        They are of techniques that were measured to pay, those that pay most first.
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
    """Each value of the setting that tells kinds apart; one without such a setting is of one kind."""
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
    """A trial as Optuna has it."""
    states = optuna.trial.TrialState
    state = states.RUNNING if running else states.COMPLETE if trial.state == "complete" else states.PRUNED
    return optuna.trial.create_trial(
        state=state,
        value=None if running else trial.value,
        params=trial.parameters,
        distributions={name: ranges[name] for name in trial.parameters},
        intermediate_values={} if running else trial.values,
    )
