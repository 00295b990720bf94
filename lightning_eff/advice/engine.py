"""The course of an advice: profile, problems, trials one by one, the best together, and a fresh measurement of that."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from lightning_eff._cli.errors import UsageError
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._exports import public
from lightning_eff.advice._running.measuring import Arm, Track, least_seconds, measure
from lightning_eff.advice._running.stopwatch import Enough, Stopwatch
from lightning_eff.advice._running.subject import Change, Subject, entry
from lightning_eff.advice.applied import LargerBatch
from lightning_eff.advice.intervals import EXACT, PRECISION, Turn, keeps_numbers, speed_up, tolerance
from lightning_eff.advice.limits import busy, conflict, largest, together
from lightning_eff.advice.looking import View, in_short, look
from lightning_eff.advice.outcomes import Outcome, Stack, closest, judged, noise_between
from lightning_eff.advice.problems import NOT_FINITE, Problem, Problems, became_not_finite
from lightning_eff.advice.progress import Watchman
from lightning_eff.advice.suggestions import Suggestion, suggestions
from lightning_eff.advice.trials import Trial, candidates

#: Fractions of the time at which parts end: the profile, the trials, the stack, its fresh measurement.
PROFILE, TRIALS, STACK, FRESH = 0.12, 0.64, 0.8, 0.93
COMPILING = 40.0  #: seconds that a trial with a slow first step needs
FEW = 6  #: suggestions
CLOSEST = 3  #: trials that are measured again where no trial made the run faster
WAITS = 0.15  #: the fraction of the time, from which waiting for data comes first


@dataclass
class Findings:
    """The findings of an advice.

    Attributes:
        name: of the module.
        view: the profile.
        outcomes: of the trials.
        left: trials that were skipped, with the reason.
        skipped: exact ones among them that could make the run faster, and had no time.
        stack: the best exact stack.
        lower: the same with the best lower precision; without trials where none is faster.
        problems: of the run.
        suggestions: what changes training.
        notes: what the reader must know of how this was measured.
        failures: by the part of the advice that failed: the error, and what was therefore not measured.
        unmeasured: exact trials that could make the run faster, and were not measured because the run failed beside them.
        seconds: that it took.
        first: seconds after which the first ratio was known.
        configs: the run's own.
    """

    name: str
    view: View
    outcomes: list[Outcome] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    stack: Stack = field(default_factory=Stack)
    lower: Stack = field(default_factory=Stack)
    problems: list[Problem] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)
    seconds: float = 0.0
    first: float | None = None
    configs: tuple[str, ...] = ()


class Engine:
    """Finds an advice.

    Args:
        subject: the run.
        watch: divides the time.
    """

    def __init__(self, subject: Subject, watch: Watchman) -> None:
        self.subject, self.watch = subject, watch
        self._noise = 0.0
        self._numbers: Any = None
        self._turns: dict[str, tuple[list[Turn], list[Turn]]] = {}  # by trial: the baseline's beside it, and its own

    def run(self) -> Findings:
        """The advice; parts that fail are noted, and do not end the others.

        Raises:
            Exception: whatever the run itself raises, since there is nothing to advise then.
        """
        self.watch.say("profiling the run")
        view = look(self.subject, limit=max(0.06 * self.watch.seconds, 2.0))
        if not view.step_seconds:
            raise UsageError(
                f"advise: {self.subject.name} ended before it made 4 steps, so there is nothing to measure. Give it more data."
            )
        self._numbers = view.numbers
        found = Findings(self.subject.name, view, notes=list(self.subject.notes), configs=self.subject.configs)
        found.failures.update(view.failed)
        self._look_for_problems(found)
        if (load := busy()) is not None:
            found.notes.append(load)
        trials, found.left = candidates(view, self.subject)
        self._try_each(found, trials)
        if self._noise > tolerance(self.subject.precision):
            found.notes.append(
                f"Two plain runs with the same seed differ by {self._noise:.0e} in the gradients of their first step, so it is"
                " not known whether a change keeps the numbers. Something draws random numbers from a state of its own, such as"
                " a data set. Seed it anew in each run."
            )
        self._find_largest_batch(found)
        self._try_again(found)
        self._combine(found)
        self._measure_again(found)
        self._suggest(found)
        found.seconds = self.watch.spent
        return found

    # -- problems and suggestions

    def _look_for_problems(self, found: Findings) -> None:
        self.watch.say("looking for problems in the run")
        eye = Problems(optimizer_steps=found.view.steps, **self.subject.planned)
        limit = max(0.06 * self.watch.seconds, 2.0)
        try:
            validated(self.subject, eye, limit=limit)
        except Exception as error:
            found.failures["validation"] = (
                f"{in_short(error)}. Problems that show only in validation were not looked for."
            )
            if not eye.trained:
                try:
                    validated(self.subject, eye, limit=limit, validation={"limit_val_batches": 0})
                except Exception as again:
                    found.failures["problems"] = f"{in_short(again)}. Problems of the run were not looked for."
        found.problems = eye.problems()

    def _suggest(self, found: Findings) -> None:
        self.watch.say("trying what changes training for two steps")
        try:
            every = suggestions(found.view.found(self.subject.callbacks), self.subject.module())
        except Exception as error:
            found.failures["suggestions"] = f"{in_short(error)}. Techniques that change training were not looked at."
            return
        for one in every:
            if len(found.suggestions) >= FEW or (self.watch.left < 0 and found.suggestions):
                break
            why = self._refused(Change((one.config,)))
            if why is None:
                found.suggestions.append(one)
            else:
                found.left[one.name] = why

    def _refused(self, change: Change) -> str | None:
        """Why two steps with a change do not run; None where they do."""
        watch = Stopwatch(1, lambda: False, lambda: None, numbers=False, skip=0)
        try:
            with redirect_stdout(StringIO()), undisturbed():
                self.subject.seed()
                built = self.subject.build(change, [watch])
                built.trainer.fit(built.module, **built.data)
        except Enough:
            return None
        except Exception as error:
            return " ".join(str(error).split()) or type(error).__name__
        return None

    # -- trials

    def _try_each(self, found: Findings, trials: Sequence[Trial]) -> None:
        left = list(trials)
        for group in self._groups(found.view, trials):
            slow = not group[0].slow and any(trial.slow for trial in left)
            deadline = self._deadline(found, len(left), len(group), slow=slow)
            left = [trial for trial in left if trial not in group]
            if group[0].slow and self._end_of_trials(found) - time.monotonic() < 0.75 * COMPILING:
                text = (
                    f"compiling may take more than the {max(self.watch.left, 0):.0f} s that were left. Use more minutes"
                )
                self._skip(found, group, text)
                continue
            window = int(self.subject.settings.get("accumulate_grad_batches", 1))
            time_left = self._end_of_trials(found) - time.monotonic()
            fits = [
                k for k in range(1, len(group) + 1) if least_seconds(found.view.step_seconds, window, k + 1) < time_left
            ]
            able = max(fits, default=0) or (0 if found.outcomes else 1)
            self._skip(found, group[able:], "there was no time left. Use more minutes")
            group = group[:able]
            if not group:
                continue
            self.watch.say(f"trying {', '.join(trial.name for trial in group)}")
            arms = [Arm(trial.name, trial.tried, trial.unit) for trial in group]
            baseline, *tracks = self._measure(found.view, arms, deadline, compiled=group[0].slow)
            if not baseline.turns and baseline.error:
                names = ", ".join(arm.name for arm in arms)
                found.failures[f"the baseline beside {names}"] = f"{baseline.error}. These trials were not measured."
                found.left.update({trial.name: "the baseline failed beside it" for trial in group})
                found.unmeasured += [trial.name for trial in group if trial.kind == EXACT and not trial.late]
                continue
            if baseline.not_finite and all(one.name != NOT_FINITE for one in found.problems):
                found.problems.insert(0, became_not_finite(baseline.not_finite))
            self._noise = max(self._noise, noise_between(self._numbers, baseline.numbers))
            for trial, track in zip(group, tracks, strict=True):
                planned = None if found.view.steps is None else found.view.steps * window
                one = judged(trial, baseline, track, self.subject.precision, self._noise, planned)
                found.outcomes.append(one)
                self._turns[trial.name] = (baseline.turns, track.turns)
                if one.speed is not None and found.first is None:
                    found.first = self.watch.spent

    def _try_again(self, found: Findings) -> None:
        """Where no trial made the run faster, use the time that a stack would take for those that came closest."""
        if any(one.faster and one.kind == EXACT and one.trial.recipe for one in found.outcomes):
            return
        near = closest(found.outcomes, min(CLOSEST, together(found.view)))
        window = int(self.subject.settings.get("accumulate_grad_batches", 1))
        now = time.monotonic()
        deadline = now + 0.5 * (self.watch.until(FRESH) - now)  # the other half confirms what is found
        starts = sum(one.start_seconds for one in near)
        least = least_seconds(found.view.step_seconds, window, len(near) + 1)
        if not near or starts + 2 * least > deadline - now:
            return
        self.watch.say(f"trying {', '.join(one.trial.name for one in near)} again")
        arms = [Arm(one.trial.name, one.trial.tried, one.trial.unit) for one in near]
        baseline, *tracks = self._measure(found.view, arms, deadline)
        for one, track in zip(near, tracks, strict=True):
            if track.error and not track.turns:
                continue
            plain, own = self._turns[one.trial.name]
            count = min(len(baseline.turns), len(track.turns))
            length = min(len(plain), len(own))
            one.speed = speed_up(
                [*plain[:length], *baseline.turns[:count]], [*own[:length], *track.turns[:count]], one.trial.unit
            )
            one.count_start(baseline.step_seconds - track.step_seconds)

    @staticmethod
    def _skip(found: Findings, trials: Sequence[Trial], why: str) -> None:
        """Leave out trials for lack of time."""
        found.left.update({trial.name: why for trial in trials})
        found.skipped += [trial.name for trial in trials if trial.kind == EXACT and not trial.late]

    def _end_of_trials(self, found: Findings) -> float:
        """When the trials must end: later, if there is nothing yet that could be stacked."""
        return self.watch.until(TRIALS if any(one.faster for one in found.outcomes) else STACK)

    def _deadline(self, found: Findings, left: int, group: int, *, slow: bool) -> float:
        """When a group of trials must end, with ``left`` trials to go; ``slow`` keeps time for one that compiles."""
        now = time.monotonic()
        free = max(self._end_of_trials(found) - now, 0.0)
        if slow and free > 2 * COMPILING:
            free -= COMPILING
        return now + free * min(group / max(left, 1), 1.0)

    def _measure(
        self, view: View, arms: Sequence[Arm], deadline: float, *, thorough: bool = False, compiled: bool = False
    ) -> list[Track]:
        return measure(
            self.subject,
            arms,
            step_seconds=view.step_seconds,
            deadline=deadline,
            thorough=thorough,
            compiled=compiled,
            tell=self.watch.say,
        )

    def _groups(self, view: View, trials: Sequence[Trial]) -> Iterator[list[Trial]]:
        """Trials that are measured together: as many as fit into memory; loaders with workers, and compilation, apart."""
        size = together(view)
        loaders = [t for t in trials if t.group == "loader"]
        slow = [t for t in trials if t.slow]
        batches = [t for t in trials if t.group == "batch"]
        rest = [t for t in trials if t not in loaders and t not in slow and t not in batches]
        parts = [[t for t in rest if not t.late], slow, batches, [t for t in rest if t.late]]
        parts.insert(0 if view.waiting > WAITS else 1, loaders)  # workers start slowly
        for part in parts:
            yield from (part[i : i + size] for i in range(0, len(part), 1 if part is slow else size))

    def _find_largest_batch(self, found: Findings) -> None:
        """Note the largest batch that fits into the GPU's memory, also with recomputed blocks."""
        name, size = "largest batch", found.view.loader["batch_size"]
        if found.view.run.accelerator != "cuda":
            found.left[name] = f"memory of a {found.view.run.accelerator.upper()} is not limited as a GPU's is"
            return
        if not found.view.loader["plain"] or not size:
            found.left[name] = "the training loader cannot be built again"
            return
        self.watch.say("looking for the largest batch that fits")
        recomputed = Change((entry(public.found("Rematerialization")),))
        stacks = [("", Change()), *([(" with Rematerialization", recomputed)] if found.view.run.num_blocks else [])]
        for words, change in stacks:

            def fails(factor: int, change: Change = change) -> str | None:
                larger = Change((entry(LargerBatch, factor=factor),))
                return self._refused(change.plus(larger))

            deadline = time.monotonic() + 0.04 * self.watch.seconds
            factor, why = largest(fails, found.view.loader["length"] or 1, deadline)
            found.notes.append(f"The largest batch that was tried and fits{words} has {size * factor} samples ({why}).")

    # -- the stack

    def _combine(self, found: Findings) -> None:
        """Add the best exact trials one after another, as long as each makes the stack faster."""
        loader = found.view.waiting > WAITS  # what computes faster shows only once data do
        able = [o for o in found.outcomes if o.kind == EXACT and o.trial.recipe and o.speed is not None and not o.error]
        able = [
            o
            for o in able
            if o.faster or (loader and o.speed is not None and o.speed.estimate > 1 and not o.trial.late)
        ]
        for one in able:
            if not one.pays:
                found.stack.tried.append(
                    f"{one.trial.name} was left out: it pays for its start after {one.pays_after:,} batches, and this run has"
                    f" {one.planned:,}."
                )
        able = [o for o in able if o.pays]
        able.sort(key=lambda o: (-o.faster, -(o.speed.estimate if o.speed else 0.0)))
        if not able or not able[0].faster:
            return
        stack, waiting = found.stack, list(able)
        stack.trials = [waiting.pop(0).trial]
        while waiting:
            following = waiting.pop(0).trial
            if following.group and following.group in {trial.group for trial in stack.trials}:
                continue
            if (why := conflict([*stack.trials, following])) is not None:
                stack.tried.append(f"{following.name} cannot be added: {why}.")
                continue
            if time.monotonic() > self.watch.until(STACK):
                stack.tried.append(f"{following.name} was not tried together with the stack, because time was up.")
                continue
            self.watch.say(f"trying {' + '.join(t.name for t in (*stack.trials, following))}")
            more = Stack([*stack.trials, following])
            arms = [Arm("stack", stack.measured), Arm("more", more.measured)]
            share = (self.watch.until(STACK) - time.monotonic()) / (len(waiting) + 1)
            baseline, before, after = self._measure(found.view, arms, time.monotonic() + max(share, 1.0), thorough=True)
            if after.error or not after.turns:
                stack.tried.append(f"{following.name} was not added, because it failed in the stack: {after.error}")
                continue
            ratio = speed_up(before.turns, after.turns)
            keeps = baseline.numbers is None or after.numbers is None or self._keeps(baseline, after)
            told = (
                "not measured"
                if ratio is None
                else f"{ratio.estimate:.2f} times as fast [{ratio.low:.2f}, {ratio.high:.2f}]"
            )
            if ratio is not None and ratio.low > 1 and keeps:
                stack.trials.append(following)
                stack.tried.append(f"{following.name} was added: with it, the stack is {told}.")
            else:
                why = "" if keeps else " Together they change numbers by more than rounding."
                stack.tried.append(f"{following.name} was not added: with it, the stack is {told}.{why}")

    def _keeps(self, baseline: Track, own: Track) -> bool:
        assert baseline.numbers is not None and own.numbers is not None
        return keeps_numbers(*baseline.numbers.differences(own.numbers), self.subject.precision, self._noise)

    def _measure_again(self, found: Findings) -> None:
        """Measure the stack, and the stack with lower precision, against the baseline on new turns."""
        lower = [o for o in found.outcomes if o.kind == PRECISION and o.faster and o.trial.recipe and not o.trial.late]
        lower.sort(key=lambda o: -(o.speed.estimate if o.speed else 0.0))
        able = [[*found.stack.trials, one.trial] for one in lower]
        able = [trials for trials in able if conflict(trials) is None][:1] + [[one.trial] for one in lower[:1]]
        lowers = [Stack(trials) for i, trials in enumerate(able) if trials not in able[:i]]
        stacks = [stack for stack in (found.stack, *lowers) if stack.trials]
        if not stacks:
            return
        self.watch.say("measuring the best stack again")
        arms = [Arm(f"stack {i}", stack.measured) for i, stack in enumerate(stacks)]
        deadline = max(self.watch.until(FRESH), time.monotonic() + 1.0)
        baseline, *tracks = self._measure(found.view, arms, deadline, thorough=True)
        for stack, track in zip(stacks, tracks, strict=True):
            if error := track.error or ("" if baseline.turns else baseline.error):
                names = " + ".join(t.name for t in stack.trials)
                found.failures[f"{names} together"] = f"{error}. Their speed-up was not measured on new turns."
            else:
                stack.compare(baseline, track)
                stack.noisy = self._noise > tolerance(self.subject.precision)
        if found.stack.trials and not found.stack.gains and found.stack.speed is not None:
            speed = found.stack.speed
            found.stack.tried.append(
                f"On new turns, {' + '.join(trial.name for trial in found.stack.trials)} is {speed.estimate:.2f} times as fast"
                f" [{speed.low:.2f}, {speed.high:.2f}]. That does not confirm a gain."
            )
        found.lower = max(
            [found.lower, *(s for s in lowers if s.gains)], key=lambda s: s.speed.estimate if s.speed else 0.0
        )
        self.watch.say("looking at where the time goes then")
        for stack in (found.stack, found.lower):
            if stack.gains and (self.watch.left > 0.04 * self.watch.seconds or stack is found.stack):
                try:
                    stack.view = look(self.subject, stack.measured, limit=max(0.03 * self.watch.seconds, 1.0))
                except Exception as error:
                    found.failures["the recipe's profile"] = (
                        f"{in_short(error)}. The recipe's step time and memory by part were not measured."
                    )


def validated(subject: Subject, eye: Any, *, limit: float, validation: Mapping[str, Any] | None = None) -> None:
    """Train for some steps and validate on some batches, with ``eye`` among the callbacks."""
    from lightning_eff.advice._running.rehearsal import Rehearsal

    with redirect_stdout(StringIO()), undisturbed():
        subject.seed()
        built = subject.build(
            Change(trainer=subject.validation if validation is None else validation), [eye, Rehearsal(limit)]
        )
        with suppress(Enough):
            built.trainer.fit(built.module, **built.data)
