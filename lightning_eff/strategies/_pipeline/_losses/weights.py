"""The weight of a micro-batch's loss in its batch's loss: equal weights, or the fraction of tokens that count.

If a loss is a mean over tokens that count (without labels of -100 or padding), it is not the mean of its micro-batches'
losses. It is L = Σ_i w_i L_i with w_i = n_i / Σ_j n_j, where n_i counts the tokens of micro-batch i.

Setup finds the rule that counts. It computes losses of batches derived from the first one, like later batches can be: with
labels of -100 and -1, padding, and masks that end early. Other weights of the head make the samples' losses differ a lot. A
rule holds if it predicts all these losses up to rounding. If no rule holds, the module is refused.
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
"""The type of ``microbatch_weight``, which returns a micro-batch's weight >= 0."""

_AMOUNTS = (4.0, 1.0, 0.25)  # of noise on weights outside the blocks; the first that gives finite losses is used
_ROUNDINGS = 16.0  # allowed error of a loss, in rounding errors
_APART = 1e-2  # weights that differ by more than this are different


class Trial(NamedTuple):
    """Two micro-batches, their losses, and their loss together.

    Attributes:
        path: path of the tensor that differs from the batch's samples, if there is one.
        same: counts in the batch's samples, for rules of other tensors.
    """

    what: str
    path: str | None
    pair: Pair
    losses: tuple[float, float]
    together: float
    allowed: float
    same: dict[Rule, list[float]]

    def share(self, rule: Rule) -> float | None:
        """Return the weight of the first micro-batch by ``rule``, or None if nothing counts."""
        if any(count.path == self.path for count in rule.counts):
            amounts = rule.amounts(self.pair[:2])
        else:
            amounts = self.same.get(rule) or self.same.setdefault(rule, rule.amounts(self.pair[:2]))
        total = sum(amounts)
        return amounts[0] / total if total else None

    def fits(self, rule: Rule) -> bool:
        """Whether ``rule`` predicts the loss of both from their losses."""
        first, second = self.losses
        if rule.adds:
            return abs(first + second - self.together) <= self.allowed
        share = self.share(rule)
        if share is None or not math.isfinite(share):
            return False
        allowed = self.allowed * max(1.0, abs(share))  # the weights can be negative
        return abs(share * first + (1 - share) * second - self.together) <= allowed


class Trials:
    """Runs trials of pairs, with the module's weights or changed ones.

    Args:
        losses: computes losses of batches.
        amount: size of the change of weights outside the blocks.
        blocks: whether to run the blocks.
    """

    def __init__(self, losses: UncutLosses, *, amount: float, blocks: bool) -> None:
        self.losses, self.amount, self.blocks = losses, amount, blocks
        self._same: dict[Rule, list[float]] = {}

    def of(self, what: str, pair: Pair, path: str | None = None, *, may_fail: bool = False) -> Trial | None:
        """Run the trial of a pair; return None if one of its losses is not finite.

        Args:
            what: description of the pair.
            pair: the micro-batches.
            path: path of the tensor that differs from other trials' pairs, or None.
            may_fail: whether the step may fail.
        """
        size, found = num_samples(pair.first), []
        rows = {"together": (0, 2 * size), "first": (0, 2 * size), "second": (size, 2 * size)}
        for name, which in rows.items():  # a step that fails does so at once
            loss = self.losses.loss(getattr(pair, name), rows=which, may_fail=may_fail, blocks=self.blocks)
            if loss is None or not math.isfinite(loss):
                return None
            found.append(loss)
        allowed = _ROUNDINGS * self.losses.eps * max(1.0, *map(abs, found))
        same = {} if path is None else self._same
        return Trial(what, path, pair, (found[1], found[2]), found[0], allowed, same)


def shares(amounts: Sequence[float]) -> list[float] | None:
    """Return the weights n_i / Σ n_j, or None if they are equal or nothing counts."""
    total = sum(amounts)
    return None if total == 0 or len(set(amounts)) == 1 else [n / total for n in amounts]


class Weights:
    """The weights of micro-batches in training.

    Args:
        given: function that returns a micro-batch's weight; then no rule is searched.
        who: name of the caller in messages.

    Attributes:
        rule: the rule for the elements that the loss averages; None before it is found.
        apart: what blocks leave for a loss of a micro-batch that is no part of the batch's, such as a router's balance.
    """

    def __init__(self, given: Given | None = None, *, who: str) -> None:
        self.given, self.who = given, who
        self.rule: Rule | None = None
        self.apart = ""
        self._refused: str | None = None

    def learn(self, losses: UncutLosses, batch: Any, number: int) -> None:
        """Find the rule that combines the losses of micro-batches. All ranks must call :meth:`agree` afterwards.

        Args:
            losses: :class:`.losses.UncutLosses` or :class:`.losses.CutLosses`.
            batch: the first batch.
            number: number of its micro-batches.
        """
        if self.given is not None:
            return
        self._refused = self._search(losses, batch, number)
        if self._refused is not None and losses.stack.beside:
            losses.still = True
            again = self._search(losses, batch, number)
            if again is None:
                self._refused, self.apart = None, str(losses.stack.beside)
            elif not losses.may_fail_anywhere:  # then it may be the search that fails, and not the loss
                self._refused = again

    def _search(self, losses: UncutLosses, batch: Any, number: int) -> str | None:
        """Find the rule; return why there is none."""
        size = num_samples(batch)
        losses.start(pair_of(batch, size, torch.arange(min(2, size)).repeat(2 if size < 2 else 1)).together)
        trials, blocks = self._basic(losses, batch, size, number)
        rules = candidates(batch, size, losses.seen)
        base = [rule for rule in rules if all(trial.fits(rule) for trial in trials)]
        if not base:
            return self._none_fits(losses, trials)
        if blocks and not losses.may_fail_anywhere:
            return (
                f"{self.who}: the weights of micro-batches cannot be found, because the model is divided already and"
                f" training_step does not run without its blocks. Create the weights on all ranks (init_on='all')."
                f" {self._way_out()}"
            )
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
        return self._take(left, trials) if left else self._none_fits(losses, trials)

    def _basic(self, losses: UncutLosses, batch: Any, size: int, number: int) -> tuple[list[Trial], bool]:
        """Run trials of the unchanged batch, and find out whether other trials must run the blocks."""
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

    def _take(self, left: list[Rule], trials: list[Trial]) -> str | None:
        """Choose the first rule that fits; return why not, if another rule that fits gives other weights."""
        rule = left[0]
        for other in left[1:]:
            for trial in trials:
                if rule.adds != other.adds:
                    apart = True
                else:
                    mine, theirs = trial.share(rule), trial.share(other)
                    apart = mine is not None and theirs is not None and abs(mine - theirs) > _APART
                if apart:
                    return (
                        f"{self.who}: the weights of micro-batches in training_step's loss cannot be found: it can be a mean"
                        f" over {rule}, or over {other}. Two micro-batches ({trial.what}) have losses of"
                        f" {trial.losses[0]:.6g} and {trial.losses[1]:.6g}, which are too similar to decide. {self._way_out()}"
                    )
        self.rule = rule
        return None

    def _none_fits(self, losses: UncutLosses, trials: list[Trial]) -> str:
        if not trials:
            return f"{self.who}: no two micro-batches have a finite loss. {self._way_out()}"
        trial = next((t for t in trials if not t.fits(EQUAL)), trials[-1])
        first, second = trial.losses
        with losses.at():
            drawn = losses.loss(trial.pair.first, 1, may_fail=True) != losses.loss(trial.pair.first, 0, may_fail=True)
        random = (
            " The step draws random numbers itself, such as NumPy's, which can be the cause, because they do not depend on"
            " the sample."
            if drawn
            else ""
        )
        return (
            f"{self.who}: two micro-batches ({trial.what}) with losses of {first:.6g} and {second:.6g} have a loss of"
            f" {trial.together:.6g} together, but a pipeline computes the loss of each micro-batch separately. It is not their"
            f" mean ({(first + second) / 2:.6g}), their sum, or a mean weighted by countable elements. The loss may compare"
            f" samples (contrastive), weigh classes, or add means over tokens and over samples.{random} {self._way_out()}"
        )

    def _way_out(self) -> str:
        return (
            f"Set {self.who}(microbatch_weight=f), where f(micro_batch) returns a number, such as the number of its labels that"
            " count, the sum of its class weights, or 1.0 for the mean of the micro-batches' losses. Or keep batches whole with"
            " schedule='GPipe', num_microbatches=1, or use pipeline_parallel_size=1."
        )

    def agree(self) -> None:
        """Send the rule of the first process that found one to all processes; collective.

        Raises:
            ValueError: on all processes, if one of them found that no rule fits.
        """
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (self.rule, self._refused, self.apart))
        refused = next((message for _, message, _ in told if message is not None), None)
        if refused is not None:
            raise ValueError(refused)
        self.rule = next((rule for rule, _, _ in told if rule is not None), None)
        apart = next((names for *_, names in told if names), "")
        if apart:
            rank_zero_info(
                f"{self.who}: what blocks leave in {apart}, such as a router's balance loss, is computed from each micro-batch"
                " and weighted as its loss, as in an accumulation window. It differs from that of the whole batch."
                " schedule='GPipe' with num_microbatches=1 keeps the batch whole, but stages then wait."
            )
        if self.rule is not None and self.rule != EQUAL:
            how = (
                "are added, since the loss is a sum"
                if self.rule.adds
                else f"are weighted by {self.rule}, since the loss is a mean over it"
            )
            rank_zero_info(f"{self.who}: the losses of micro-batches {how}.")

    def of(self, microbatches: Sequence[Any]) -> list[float] | None:
        """Return the weights of a batch's micro-batches in its loss, or None for the mean."""
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
                f"{self.who}: microbatch_weight returned {found!r}; expected a finite number >= 0, the weight of"
                " the micro-batch in the loss."
            )
        return value

    def defined(self, microbatches: Sequence[Any], weights: Sequence[float] | None) -> list[Any]:
        """Return micro-batches whose losses are all finite.

        If nothing counts in a micro-batch, its mean loss is 0 / 0, and its gradients are NaN with any weight. Such a
        micro-batch gets one element that counts, and its loss gets weight 0. With given weights, the heaviest micro-batch
        replaces it.
        """
        if weights is None or all(weights):
            return [*microbatches]
        heaviest = microbatches[max(range(len(weights)), key=lambda i: weights[i])]

        def instead(part: Any) -> Any:
            return heaviest if self.rule is None else self.rule.with_one(part, microbatches)

        return [part if weight else instead(part) for part, weight in zip(microbatches, weights, strict=True)]


def tell_of_statistics(module: nn.Module, number: int, size: int, *, who: str) -> None:
    """Report modules that normalize by batch statistics (BatchNorm), which now come from ``size`` samples."""
    names = [name for name, m in module.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if names and number > 1:
        rest = f" and {len(names) - 1} more modules normalize" if len(names) > 1 else " normalizes"
        rank_zero_info(
            f"{who}: {names[0]!r}{rest} over each of {number} micro-batches of {size} samples and not over the batch, so"
            " losses differ from those of one process. schedule='GPipe' with num_microbatches=1 keeps the batch whole, but"
            " stages then wait. GroupNorm and LayerNorm do not depend on the batch."
        )


def weighted(losses: Mapping[int, Tensor], weights: Sequence[float] | None, records: Mapping[str, Record]) -> float:
    """Return the batch's loss from its micro-batches' losses; a record of these losses gets their weights too."""
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
