"""What a micro-batch's loss weighs in its batch's: as much as the others, or its share of the tokens that count.

A loss that is a mean over tokens of which some do not count (labels of -100, padding) is not the mean of its micro-batches'
losses: L = Σ_i w_i L_i with w_i = n_i / Σ_j n_j, where n_i counts the tokens of micro-batch i. What counts is not asked of
the user, but found at setup: the loss itself is asked, on batches made up from the first one, such as later ones may be
(labels of -100 and -1, padding, masks that end early), with weights of the head at which the samples' losses lie far
apart. A rule holds if it gives the loss of all of them to rounding. If none does, the module is refused.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_eff._core.batches import num_samples
from lightning_eff.strategies._pipeline._losses.counting import EQUAL, Rule, candidates, joined
from lightning_eff.strategies._pipeline._losses.losses import UncutLosses
from lightning_eff.strategies._pipeline._losses.probing import Pair, pair_of, variants
from lightning_eff.strategies._pipeline.logging import Record

Given = Callable[[Any], float]
"""``microbatch_weight``: a micro-batch's weight, >= 0."""

_AMOUNTS = (4.0, 1.0, 0.25)  # of noise on weights outside the blocks; the first of them that gives finite losses
_ROUNDINGS = 16.0  # how many a loss may be off
_APART = 1e-2  # shares of micro-batches that differ by more than this are different


class Trial(NamedTuple):
    """Two micro-batches, their losses, and their loss together.

    Attributes:
        path: of the tensor in which they are other than the batch's own samples, if there is one.
        same: what counts in the batch's own samples, by rules of other tensors.
    """

    what: str
    path: str | None
    pair: Pair
    losses: tuple[float, float]
    together: float
    allowed: float
    same: dict[Rule, list[float]]

    def share(self, rule: Rule) -> float | None:
        """Of the first micro-batch in the two, by ``rule``; None if nothing counts."""
        if any(count.path == self.path for count in rule.counts):
            amounts = rule.amounts(self.pair[:2])
        else:
            amounts = self.same.get(rule) or self.same.setdefault(rule, rule.amounts(self.pair[:2]))
        total = sum(amounts)
        return amounts[0] / total if total else None

    def fits(self, rule: Rule) -> bool:
        """Whether the loss together is what ``rule`` makes of the two."""
        first, second = self.losses
        if rule.adds:
            return abs(first + second - self.together) <= self.allowed
        share = self.share(rule)
        if share is None or not math.isfinite(share):
            return False
        allowed = self.allowed * max(1.0, abs(share))  # of weights that may be negative
        return abs(share * first + (1 - share) * second - self.together) <= allowed


class Trials:
    """Trials of pairs, with the module's weights as they are or others.

    Args:
        losses: of batches.
        amount: by which weights outside the blocks are other ones.
        blocks: run them.
    """

    def __init__(self, losses: UncutLosses, *, amount: float, blocks: bool) -> None:
        self.losses, self.amount, self.blocks = losses, amount, blocks
        self._same: dict[Rule, list[float]] = {}

    def of(self, what: str, pair: Pair, path: str | None = None, *, may_fail: bool = False) -> Trial | None:
        """The trial of a pair; None if one of its losses is no finite number.

        Args:
            path: of the tensor in which the pair is other than that of other trials; None if it is a pair by itself.
        """
        size, found = num_samples(pair.first), []
        rows = {"together": (0, 2 * size), "first": (0, 2 * size), "second": (size, 2 * size)}
        for name, which in rows.items():  # what cannot be run fails at once
            loss = self.losses.loss(getattr(pair, name), rows=which, may_fail=may_fail, blocks=self.blocks)
            if loss is None or not math.isfinite(loss):
                return None
            found.append(loss)
        allowed = _ROUNDINGS * self.losses.eps * max(1.0, *map(abs, found))
        same = {} if path is None else self._same
        return Trial(what, path, pair, (found[1], found[2]), found[0], allowed, same)


def shares(amounts: Sequence[float]) -> list[float] | None:
    """The weights n_i / Σ n_j; None if they are all the same, or nothing counts."""
    total = sum(amounts)
    return None if total == 0 or len(set(amounts)) == 1 else [n / total for n in amounts]


class Weights:
    """The weights of micro-batches in training.

    Args:
        given: a function that says what a micro-batch weighs; nothing is looked for then.
        who: for messages.

    Attributes:
        rule: what the loss is the mean of; None before it was found.
    """

    def __init__(self, given: Given | None = None, *, who: str) -> None:
        self.given, self.who = given, who
        self.rule: Rule | None = None
        self._refused: str | None = None

    def learn(self, losses: UncutLosses, batch: Any, number: int) -> None:
        """Find the rule by which two micro-batches make up their loss together. All ranks have to call :meth:`agree` after.

        Args:
            losses: :class:`.losses.UncutLosses` or :class:`.losses.CutLosses`.
            batch: the first one.
            number: of its micro-batches.
        """
        if self.given is not None:
            return
        size = num_samples(batch)
        losses.start(pair_of(batch, size, torch.arange(min(2, size)).repeat(2 if size < 2 else 1)).together)
        trials, blocks = self._basic(losses, batch, size, number)
        rules = candidates(batch, size, losses.seen)
        base = [rule for rule in rules if all(trial.fits(rule) for trial in trials)]
        if not base:
            self._refused = self._none_fits(losses, trials)
            return
        if blocks and not losses.may_fail_anywhere:
            self._refused = (
                f"{self.who}: what micro-batches weigh cannot be told, since the model is in pieces already and training_step"
                f" does not run without its blocks. Make the weights on all ranks (init_on='all'). {self._way_out()}"
            )
            return
        left, holding = base, []
        with losses.at(self._amount):
            run = Trials(losses, amount=self._amount, blocks=blocks)
            for path, what, pair in variants(batch, size, losses.seen):
                trial = run.of(what, pair, path, may_fail=True)
                if trial is None:
                    continue
                trials.append(trial)
                left = [rule for rule in left if trial.fits(rule)]
                if not trial.fits(EQUAL):
                    changed = [rule for rule in base if any(count.path == path for count in rule.counts)]
                    holding += [rule for rule in changed if trial.fits(rule)]
        if not left:
            left = [rule for rule in joined(holding, batch) if all(trial.fits(rule) for trial in trials)]
        if left:
            self._take(left, trials)
        else:
            self._refused = self._none_fits(losses, trials)

    def _basic(self, losses: UncutLosses, batch: Any, size: int, number: int) -> tuple[list[Trial], bool]:
        """Trials of the batch as it is; and whether blocks have to run for the others."""
        each = max(1, size // number)
        parts = [torch.arange(i, i + each) for i in range(0, each * (size // each), each)]
        pairs = [torch.cat(two) for two in combinations(parts, 2)][: max(1, number - 1)][:3]
        pairs = [pair_of(batch, size, rows) for rows in pairs or [torch.zeros(2, dtype=torch.long)]]
        with losses.at():
            run = Trials(losses, amount=0.0, blocks=True)
            trials = [run.of("as they come", pair) for pair in pairs]
        for self._amount in _AMOUNTS:
            with losses.at(self._amount):
                first = Trials(losses, amount=self._amount, blocks=True).of("as they come", pairs[0])
                if first is not None:
                    past = Trials(losses, amount=self._amount, blocks=False).of(
                        "as they come", pairs[-1], may_fail=True
                    )
                    return [t for t in (*trials, first, past) if t is not None], past is None
        self._amount = 0.0
        return [t for t in trials if t is not None], True

    def _take(self, left: list[Rule], trials: list[Trial]) -> None:
        """Keep the first of the rules that fit, unless others that fit as well give other weights."""
        rule = left[0]
        for other in left[1:]:
            for trial in trials:
                if rule.adds != other.adds:
                    apart = True
                else:
                    mine, theirs = trial.share(rule), trial.share(other)
                    apart = mine is not None and theirs is not None and abs(mine - theirs) > _APART
                if apart:
                    self._refused = (
                        f"{self.who}: what micro-batches weigh in training_step's loss cannot be told: it may be a mean over"
                        f" {rule}, or over {other}; two micro-batches ({trial.what}) have losses of {trial.losses[0]:.6g}"
                        f" and {trial.losses[1]:.6g}, too near to one another to say. {self._way_out()}"
                    )
                    return
        self.rule = rule

    def _none_fits(self, losses: UncutLosses, trials: list[Trial]) -> str:
        if not trials:
            return f"{self.who}: the loss of no two micro-batches is a finite number. {self._way_out()}"
        trial = next((t for t in trials if not t.fits(EQUAL)), trials[-1])
        first, second = trial.losses
        with losses.at():
            drawn = losses.loss(trial.pair.first, 1, may_fail=True) != losses.loss(trial.pair.first, 0, may_fail=True)
        random = (
            " The step draws random numbers of its own (NumPy's, say), which may be why: they are no others for each"
            " sample of a batch."
            if drawn
            else ""
        )
        return (
            f"{self.who}: two micro-batches ({trial.what}) with losses of {first:.6g} and {second:.6g} have a loss of"
            f" {trial.together:.6g} together. That is not their mean ({(first + second) / 2:.6g}), nor their sum, nor a mean"
            " by any number of elements that can be counted in the batches: the loss compares samples with one another"
            " (contrastive), weighs classes, or adds a mean over tokens to one over samples. A pipeline computes the loss"
            f" of each micro-batch by itself.{random} {self._way_out()}"
        )

    def _way_out(self) -> str:
        return (
            f"Say what a micro-batch weighs by {self.who}(microbatch_weight=f), a function of the micro-batch that returns a"
            " number (the number of its labels that count, the sum of its labels' class weights; 1.0 to train on the mean"
            " of the micro-batches' losses, as where gradients are accumulated); or keep batches whole by schedule='GPipe',"
            " num_microbatches=1; or use pipeline_parallel_size=1."
        )

    def agree(self) -> None:
        """Take the rule of the first process that found one, on all. Collective over all of them.

        Raises:
            ValueError: on all, if one of them found that no rule fits.
        """
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (self.rule, self._refused))
        refused = next((message for _, message in told if message is not None), None)
        if refused is not None:
            raise ValueError(refused)
        self.rule = next((rule for rule, _ in told if rule is not None), None)
        if self.rule is not None and self.rule != EQUAL:
            how = (
                "are added up: the loss is a sum"
                if self.rule.adds
                else f"count by {self.rule}, of which it is the mean"
            )
            rank_zero_info(f"{self.who}: the losses of micro-batches {how}.")

    def of(self, microbatches: Sequence[Any]) -> list[float] | None:
        """The factors of a batch's micro-batches in its loss; None if that is their mean."""
        if self.given is not None:
            return shares([self._asked(part) for part in microbatches])
        if self.rule is None or self.rule == EQUAL:
            return None
        return [1.0] * len(microbatches) if self.rule.adds else shares(self.rule.amounts(microbatches))

    def _asked(self, microbatch: Any) -> float:
        assert self.given is not None
        found = self.given(microbatch)
        value = float(found)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"{self.who}: microbatch_weight returned {found!r}; expected a finite number >= 0, what the micro-batch"
                " weighs in the loss."
            )
        return value

    def defined(self, microbatches: Sequence[Any], weights: Sequence[float] | None) -> list[Any]:
        """Micro-batches whose losses are all numbers.

        Where nothing counts the mean is 0 / 0, and so are its gradients, whatever they are multiplied by. Such a
        micro-batch gets one element that counts: its loss weighs nothing. Where the weights were given, the heaviest
        micro-batch is run in its place.
        """
        if weights is None or all(weights):
            return [*microbatches]
        heaviest = microbatches[max(range(len(weights)), key=lambda i: weights[i])]

        def instead(part: Any) -> Any:
            return heaviest if self.rule is None else self.rule.with_one(part, microbatches)

        return [part if weight else instead(part) for part, weight in zip(microbatches, weights, strict=True)]


def tell_of_statistics(module: nn.Module, number: int, size: int, *, who: str) -> None:
    """Say which modules normalize by a batch's own statistics (BatchNorm), which are those of ``size`` samples now."""
    names = [name for name, m in module.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if names and number > 1:
        rest = f" and {len(names) - 1} more modules normalize" if len(names) > 1 else " normalizes"
        rank_zero_info(
            f"{who}: {names[0]!r}{rest} over each of {number} micro-batches of {size} samples, as where gradients are"
            " accumulated, not over the batch: losses are not those of one process. schedule='GPipe' with"
            " num_microbatches=1 keeps the batch whole, and lets stages wait for one another; GroupNorm and LayerNorm do"
            " not depend on the batch."
        )


def weighted(losses: Mapping[int, Tensor], weights: Sequence[float] | None, records: Mapping[str, Record]) -> float:
    """The batch's loss from its micro-batches'; a record of these same losses gets their weights."""
    stacked = torch.stack(list(losses.values())).double().cpu()
    if weights is None:
        return float(stacked.mean())
    mine = [weights[microbatch] for microbatch in losses]
    for record in records.values():
        values = record.values
        numbers = len(values) == len(mine) and all(isinstance(v, Tensor | float) for v in values)
        if numbers and [float(v) for v in values] == [float(loss) for loss in losses.values()]:
            record.weights = mine
    return float(stacked @ torch.tensor(mine, dtype=torch.float64))
