"""Runs of many techniques and a precision plugin at once, and what must be true of them.

What is wrong with a stack is looked for in each of its parts by :func:`tests.covering.smallest`, and told of the smallest.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, cycle, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_eff import EfficiencyMonitor, ExactResume
from lightning_eff._core.technique import Technique
from tests.cases import Case
from tests.covering import Pair, Stack, design, pairs, smallest, watched
from tests.models import flat
from tests.plugins import PluginCase
from tests.runs import NUM_STEPS, SaveBatches, differences, final_state, fit

MODEL = "tiny_gpt"
RESUMED = (7,)  # of 12 steps, in epochs of 5 batches
MONITORED = 3  # a monitor, which counts each operation, stands beside one of so many stacks
EARLY = 3  # batches in which most techniques have changed weights
CUTTING_SECONDS = 120  # in which what fails is cut down, well below the time that a test may take
FEW = 3  # a name is looked at beside its partners alone where these with it are less than one in so many of a stack


def declared(cases: Mapping[str, Case], plugins: Mapping[str, PluginCase]) -> dict[Pair, str]:
    """The pairs that may not train together, as the classes say, and why; a trainer has one precision plugin."""
    found = {frozenset(two): "a trainer has one precision plugin" for two in combinations(plugins, 2)}
    bases = {name: {name} for name in cases}
    for name, plugin in plugins.items():
        bases[name] = {cls.__name__ for cls in type(plugin.build(plugin.precisions[0])).__mro__}
    for name, case in cases.items():
        for enemy, why in case.active().conflicts.items():
            found |= {frozenset((name, other)): why for other, classes in bases.items() if enemy in classes}
    return found


@dataclass(frozen=True)
class Stacked:
    """Names that are tried at once: on which module, and which of them are looked at, beside which others.

    Attributes:
        model: of which module.
        names: that are tried.
        seen: those that are left out, to see whether that shows, beside which others.
        exact: whether those that leave weights as they are stand beside one here beside which they stood in no stack before,
            so that a run without them is compared.
        monitored: whether a monitor stands beside them where they are resumed.
    """

    model: str
    names: Stack
    seen: dict[str, Stack]
    exact: bool = True
    monitored: bool = True


def stacked(
    cases: Mapping[str, Case],
    plugins: Collection[str],
    refused: Collection[Pair],
    seen: Collection[str],
    name: str | None = None,
    most: int | None = None,
) -> list[Stacked]:
    """Few stacks in which every pair that can train together stands: on the one module, and on those of cases apart.

    Args:
        cases: the techniques; one whose case has another module than :data:`MODEL` stands beside those that train that.
        plugins: names of plugins.
        refused: pairs that may stand together in none.
        seen: names that can be looked at.
        name: if given, only pairs with it.
        most: in how many stacks of a module each is looked at; None until it was beside all of its partners.
    """
    models = sorted({case.model for case in cases.values()} - {MODEL})
    found: list[Stacked] = []
    for model in (MODEL, *models):
        own = {other for other, case in cases.items() if case.model == model} | (
            {*plugins} if model == MODEL else set()
        )
        names = own | {
            *plugins,
            *(other for other, case in cases.items() if case.model == MODEL and model not in case.refuses),
        }
        wanted = {pair for pair in pairs(names) if pair & own and (name is None or name in pair)}
        every = None if model == MODEL and name is None else wanted
        stacks = design(names, refused, every)
        # on a module apart the others are not looked at once more, unless they are asked for
        some = own if model != MODEL and name is None else names
        looked_at = watched(stacks, [one for one in seen if one in some], every, most)
        unmoved = {one for one in names if one in cases and cases[one].exact and not cases[one].rounds}
        known: set[Pair] = set()
        for stack, at in zip(stacks, looked_at, strict=True):
            beside = {frozenset((a, b)) for a in unmoved & set(stack) for b in stack if a != b}
            found.append(Stacked(model, stack, at, bool(beside - known), len(found) % MONITORED == 0))
            known |= beside
    return found


def model_of(names: Collection[str], cases: Mapping[str, Case]) -> str:
    """The module that these are tried on together."""
    return next((cases[name].model for name in names if name in cases and cases[name].model != MODEL), MODEL)


class _Trace(pl.Callback):
    """Notes all weights after each batch, or compares them with those noted and stops the run where they differ.

    Args:
        known: what is compared with.
        batches: after so many the run is stopped, if given.
    """

    def __init__(self, known: Sequence[Tensor] | None = None, batches: int | None = None) -> None:
        self.known, self.batches = known, batches
        self.seen: list[Tensor] = []
        self.differs = False
        self.figures: dict[str, set[str]] = {}  # of each technique, those that were above zero after some step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.seen.append(flat(pl_module).cpu())
        for technique in (callback for callback in trainer.callbacks if isinstance(callback, Technique)):
            above = {figure for figure, value in technique.report().items() if value > 0}
            self.figures.setdefault(type(technique).__name__, set()).update(above)
        if self.known is not None:
            at = len(self.seen) - 1
            self.differs = at >= len(self.known) or not torch.equal(self.seen[at], self.known[at])
        if self.differs or len(self.seen) == self.batches:
            trainer.should_stop = True


class _Until(pl.Callback):
    """Stops the run as this batch ends."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        trainer.should_stop = trainer.fit_loop.epoch_loop.batch_progress.total.processed >= self.batch


@dataclass(frozen=True)
class Whole:
    """An undisturbed run: weights after each step, what it left behind, and each technique's figures above zero."""

    trace: list[Tensor]
    final: dict[str, Tensor]
    weights: Tensor
    figures: dict[str, set[str]]
    steps: int


@dataclass
class Stacks:
    """Runs sets of names of these cases; an undisturbed run is made once.

    Attributes:
        cases: the techniques, by name.
        plugins: the precision plugins, by name.
        directory: for checkpoints.
        precision: of runs without a plugin: the one that the stack's plugin is around.
        model: of which module.
        monitored: whether a monitor stands beside what is resumed.
    """

    cases: Mapping[str, Case]
    plugins: Mapping[str, PluginCase]
    directory: Path
    precision: str = "32-true"
    model: str = MODEL
    monitored: bool = True
    _whole: dict[Stack, Whole] = field(default_factory=dict)
    _numbers: dict[Stack, int] = field(default_factory=dict)

    def run(self, names: Stack, *callbacks: pl.Callback, backwards: bool = False, resume: Path | None = None) -> Any:
        """The module and the trainer of one run of ``names``.

        Where none of them is a technique, ``ExactResume`` is there for the data, as the others bring it along.
        """
        built: list[Technique] = [self.cases[name].active() for name in names if name in self.cases]
        built = (built[::-1] if backwards else built) or [ExactResume()]
        settings: dict[str, Any] = {"precision": self.precision}
        for name in self.plugins.keys() & set(names):
            settings = {"plugins": [self.plugins[name].build(self.precision)]}
        with warnings.catch_warnings():  # many flags of gradients in one stack: slower, with the same numbers
            warnings.filterwarnings("ignore", "RegionalCompilation: torch's compiler has made as many versions")
            return fit(self.model, lambda: built, callbacks=callbacks, resume=resume, **settings)

    def whole(self, names: Stack) -> Whole:
        if names not in self._whole:
            trace = _Trace()
            net, trainer = self.run(names, trace, SaveBatches(self._at(names), RESUMED))
            final = final_state(net, trainer)
            self._whole[names] = Whole(trace.seen, final, flat(net).cpu(), trace.figures, trainer.global_step)
        return self._whole[names]

    def _at(self, names: Stack) -> Path:
        return self.directory / str(self._numbers.setdefault(names, len(self._numbers)))

    # -- what may be wrong: a line, or None

    def trains(self, names: Stack) -> str | None:
        try:
            whole = self.whole(names)
        except Exception as error:
            return f"is refused or fails, and no conflict is declared: {type(error).__name__}: {error}"
        if whole.steps != NUM_STEPS or not whole.weights.isfinite().all():
            finite = bool(whole.weights.isfinite().all())
            return f"trained {whole.steps} of {NUM_STEPS} steps, to weights that are {'' if finite else 'not '}finite"
        return None

    def resumes(self, names: Stack) -> str | None:
        """A run is interrupted and resumed in reversed order, or several times in turn: what of it is to blame, if any.

        In reversed order a monitor stands beside the techniques, where one is asked for.
        """
        wrong = self._resumed(names, RESUMED)
        if not wrong:
            return None
        for step in RESUMED:
            if alone := self._resumed(names, (step,), orders=(False,)):
                return f"resumed from step {step}, ends otherwise than undisturbed: {alone}"
        for step in RESUMED:
            if alone := self._resumed(names, (step,)):
                beside = ", beside a monitor," if self.monitored else ""
                return f"in reversed order{beside or ','} ends otherwise when resumed from step {step}: {alone}"
        told = ", ".join(map(str, RESUMED))
        return f"resumed again and again, at the steps {told}, in one order and the other, ends otherwise: {wrong}"

    def _resumed(self, names: Stack, steps: Sequence[int], orders: Sequence[bool] = (True, False)) -> str:
        """What differs of a run that is resumed from the first of ``steps``, ends at the next, and is resumed from there.

        Args:
            names: of the run.
            steps: where it is interrupted.
            orders: whether techniques stand in reversed order, beside a monitor, in turn.
        """
        whole = self.whole(names)
        at, net, trainer = self._at(names), None, None
        for (step, until), backwards in zip(pairwise((*steps, None)), cycle(orders)):
            beside: list[pl.Callback] = [EfficiencyMonitor()] if backwards and self.monitored else []
            if until is not None:
                beside += [SaveBatches(at / "again", [until]), _Until(until)]
            path = at / f"batch={step}.ckpt" if step == steps[0] else at / "again" / f"batch={step}.ckpt"
            net, trainer = self.run(names, *beside, backwards=backwards, resume=path)
        assert net is not None and trainer is not None
        return ", ".join(differences(whole.final, final_state(net, trainer))[:4])

    def exact(self, without: frozenset[str], names: Stack) -> str | None:
        rest = tuple(name for name in names if name not in without)
        if torch.equal(self.whole(names).weights, self.whole(rest).weights):
            return None
        return f"ends with other weights than without {' and '.join(sorted(without & set(names)))}, which change none"

    def shows(self, name: str, names: Stack) -> str | None:
        """Whether a technique's figures say that it acted; of an exact one, the figure that its case names."""
        if name not in names or self.cases[name].yields:
            return None
        above, figure = self.whole(names).figures.get(name, set()), self.cases[name].figure
        said = figure in above if figure else bool(above)
        return None if said else f"lets {name} do nothing: {figure or 'each of its figures'} is zero after every step"

    def acts(self, name: str, names: Stack) -> str | None:
        """Of all others: whether the run without it is another one, at the first batch that shows it."""
        if name not in names:
            return None
        rest = tuple(other for other in names if other != name)
        if names in self._whole:
            return self._changes(name, self.whole(names).trace, self.whole(names).weights, rest)
        begun = _Trace(batches=EARLY)  # most show it early, and no more is run of these names
        self.run(names, begun)
        trace = _Trace(begun.seen, batches=EARLY)
        self.run(rest, trace)
        if trace.differs:
            return None
        undisturbed = _Trace()
        net, _ = self.run(names, undisturbed)
        return self._changes(name, undisturbed.seen, flat(net).cpu(), rest)

    def _changes(self, name: str, known: Sequence[Tensor], end: Tensor, rest: Stack) -> str | None:
        """Whether ``rest``, a run without ``name``, has other weights than are known of one with it."""
        trace = _Trace(known)
        net, _ = self.run(rest, trace)
        if trace.differs or not torch.equal(flat(net).cpu(), end):
            return None
        return f"{name} changes nothing: without it, every step and the end are the same"


def checks(
    stacks: Stacks, stack: Stack, watched: Mapping[str, Stack], *, unmoved: bool = True
) -> list[tuple[Stack, Callable[[Stack], str | None]]]:
    """What must be true of a stack: of which of its names, and what looks at these or fewer of them.

    Args:
        stacks: runs them.
        stack: the names.
        watched: those of them that are to be seen to change something here, beside which others.
        unmoved: whether a run without those that leave weights as they are is compared.
    """
    known: Mapping[str, Case | PluginCase] = {**stacks.cases, **stacks.plugins}
    cases = {name: stacks.cases[name] for name in stack if name in stacks.cases}
    exact = frozenset(name for name, case in cases.items() if case.exact and not case.rounds)
    saving = frozenset(name for name in exact if stacks.cases[name].saves_less)
    lossy = {name for name in stack if known[name].lossy}
    found: list[tuple[Stack, Callable[[Stack], str | None]]] = [(stack, stacks.trains)]
    found.append((stack, stacks.resumes))
    found += [(stack, partial(stacks.shows, name)) for name in stack if name in stacks.cases]
    for name, partners in watched.items():
        few = tuple(sorted((name, *partners)))
        found.append((few if FEW * len(few) < len(stack) else stack, partial(stacks.acts, name)))
    if not unmoved:
        return found
    if exact and not (lossy and saving):
        found.append((stack, partial(stacks.exact, exact)))
    elif (
        exact
    ):  # what is compressed depends on what is saved, and that on a plan by measured times: not beside each other
        if exact - saving:
            found.append((tuple(name for name in stack if name not in saving), partial(stacks.exact, exact - saving)))
        found.append((tuple(name for name in stack if name not in lossy), partial(stacks.exact, exact)))
    return found


def verify(stacks: Stacks, stack: Stack, watched: Mapping[str, Stack], *, unmoved: bool = True) -> None:
    """Raise an AssertionError that names the smallest part of ``stack`` of which something is wrong, and what.

    Args:
        stacks: runs them; its ``precision`` is set to what the stack's plugin is around.
        stack: names that are allowed together.
        watched: those of them that are to be seen to change something here, beside which others.
        unmoved: whether a run without those that leave weights as they are is compared.
    """
    for name in stacks.plugins.keys() & set(stack):
        stacks.precision = stacks.plugins[name].precisions[0]
    for names, wrong in checks(stacks, stack, watched, unmoved=unmoved):
        cut_down(names, wrong)


def cut_down(names: Stack, wrong: Callable[[Stack], str | None]) -> None:
    """Raise an AssertionError that names the smallest part of ``names`` of which something is wrong, if it is of all.

    Args:
        names: are allowed together.
        wrong: what is wrong of some of them, or None; an exception that it raises is.
    """
    text = _told(wrong, names)
    if text is not None:
        part = smallest(names, lambda some: _told(wrong, some) is not None, CUTTING_SECONDS)
        told = _told(wrong, part) if part != names else text
        raise AssertionError(f"{' + '.join(part)} {told}\n(cut down from {' + '.join(names)}, which {text})")


def _told(wrong: Callable[[Stack], str | None], names: Stack) -> str | None:
    """What is wrong of ``names``, an exception in a run of them included."""
    try:
        return wrong(names)
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
