"""What a micro-batch's loss weighs in its batch's: as much as the others, or its share of the tokens that count.

A loss that is a mean over tokens of which some do not count (labels of -100, padding) is not the mean of its micro-batches'
losses: L = Σ_i w_i L_i with w_i = n_i / Σ_j n_j, where n_i counts the tokens of micro-batch i. What counts is not asked of
the user, but found on the first batch: of the integer tensors in it, that is taken which gives two micro-batches together
the loss that the uncut module has for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_eff._core.batches import map_tensors, num_samples, select, tensors
from lightning_eff.strategies._pipeline.logging import Record
from lightning_eff.strategies._pipeline.losses import Losses

_VALUES: dict[str, int] = {"labels": -100, "padding": 0}
_WATCHED = 100  # batches in which labels of -100 are looked for that the first had not


class Tokens(NamedTuple):
    """A way to count tokens.

    Attributes:
        path: of the tensor in the batch.
        kind: "labels" counts all but -100, "padding" all but 0 (a mask, or token 0).
        shifted: without the first position, as where labels are shifted against logits.
    """

    path: str
    kind: Literal["labels", "padding"]
    shifted: bool

    def __str__(self) -> str:
        what = f"batch{self.path} that are not {_VALUES[self.kind]}"
        return f"elements of {what}" + (", but for the first position" if self.shifted else "")

    def counts(self, batches: Iterable[Any]) -> list[int]:
        """How many there are in each batch; 0 if it has no such tensor."""
        counts: list[Tensor] = []
        for batch in batches:
            t = dict(tensors(batch)).get(self.path)
            counted = torch.zeros(1) if t is None else (t[..., 1:] if self.shifted else t).ne(_VALUES[self.kind])
            counts.append(counted.sum().long())
        return torch.stack(counts).tolist()  # at once: each would wait for the device

    def with_one(self, batch: Any) -> Any:
        """The batch with its last element changed to one that counts, in a copy of its tensor."""
        target = dict(tensors(batch))[self.path]

        def changed(t: Tensor) -> Tensor:
            if t is not target:
                return t
            t = t.clone(memory_format=torch.contiguous_format)
            t.view(-1)[-1] = 0 if self.kind == "labels" else 1
            return t

        return map_tensors(batch, changed)


def countable(batch: Any) -> list[Tokens]:
    """Every way to count in which some elements of ``batch`` do not count."""
    size = num_samples(batch)
    found: list[Tokens] = []
    for path, t in tensors(batch):
        if t.ndim == 0 or t.shape[0] != size or t.is_floating_point() or t.is_complex():
            continue
        for kind, value in _VALUES.items():
            if bool(t.eq(value).any()):
                shifts = (False, True) if t.ndim > 1 else (False,)
                found += [Tokens(path, cast("Any", kind), shifted) for shifted in shifts]
    return found


def shares(counts: Sequence[int]) -> list[float] | None:
    """The weights n_i / Σ n_j; None if they are all the same, or nothing counts."""
    total = sum(counts)
    return None if total == 0 or len(set(counts)) == 1 else [n / total for n in counts]


class Weights:
    """The weights of micro-batches in training.

    Attributes:
        rules: what may be counted, each of which agrees with all that was seen; none if micro-batches weigh the same.
    """

    def __init__(self, *, who: str) -> None:
        self.who = who
        self.rules: list[Tokens] = []
        self._tried: set[Tokens] = set()
        self._watched = _WATCHED

    @property
    def rule(self) -> Tokens | None:
        """What is counted."""
        return self.rules[0] if self.rules else None

    def learn(self, losses_of: Losses, batch: Any, microbatches: Sequence[Any]) -> None:
        """Find the rule by which two micro-batches make up their loss together. Every rank has to call :meth:`agree` after.

        Args:
            losses_of: :class:`.losses.UncutLosses` or :class:`.losses.CutLosses`.
            batch: the whole one.
            microbatches: it in parts.
        """
        number = len(microbatches)
        if number < 2:
            return
        counted: dict[Tokens | None, list[int]] = {None: [1] * number}
        for way in countable(batch):
            if len(set(counts := way.counts(microbatches))) > 1:
                counted[way] = counts
        left: list[Tokens | None] = list(counted)  # the ways that agree with what was seen so far
        size, pairs = num_samples(batch) // number, list(combinations(range(number), 2))

        def weights(way: Tokens | None, pair: tuple[int, int]) -> tuple[float, float]:
            first, second = (counted[way][i] for i in pair)
            return (first / (first + second), second / (first + second)) if first + second else (0.5, 0.5)

        while True:
            pair = max(pairs, key=lambda pair: len({weights(way, pair) for way in left}))
            rows = torch.cat([torch.arange(i * size, (i + 1) * size) for i in pair])
            together = select(batch, rows, num_samples(batch))
            *apart, whole = losses_of([*(microbatches[i] for i in pair), together], 0)
            off = {way: abs(sum(w * x for w, x in zip(weights(way, pair), apart, strict=True)) - whole) for way in left}
            allowed = 4 * torch.finfo(torch.float32).eps * max(1.0, abs(whole))
            left = [way for way in left if off[way] <= max(allowed, max(off.values()) / 20)]
            pairs = [p for p in pairs if p != pair and len({weights(way, p) for way in left}) > 1]
            if len(left) < 2 or not pairs:
                break
        self._tried = {way for way in counted if way is not None}
        if None not in left and losses_of([microbatches[pair[0]]], 1) != apart[:1]:
            return  # random even in evaluation: there is nothing to compare
        if left:
            self.rules = [] if None in left else [way for way in left if way is not None]
        elif off.get(None, 0.0) > 1e-3 * max(1.0, abs(whole)):
            rank_zero_warn(
                f"{self.who}: two micro-batches with losses of {apart[0]:.6g} and {apart[1]:.6g} have a loss of"
                f" {whole:.6g} together, which is not their mean: the loss is no mean over samples, nor over tokens whose"
                " number can be read off the batch (it compares samples with one another, say). The pipeline trains on"
                " the mean of the micro-batches' losses, as accumulating gradients would. Take fewer micro-batches"
                " (num_microbatches=) to come nearer to the whole batch's."
            )

    def agree(self) -> None:
        """Take the same rules on all processes: those of the first which found any. Collective over all of them."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (self.rules, self._tried))
        self.rules = next((rules for rules, _ in told if rules), [])
        self._tried = set().union(*(tried for _, tried in told))
        if self.rule is not None:
            rank_zero_info(f"{self.who}: micro-batches count by {self.rule}, of which the loss is the mean.")

    def of(self, microbatches: Sequence[Any]) -> list[float] | None:
        """The weights of a batch's micro-batches, which sum to 1; None if they are all the same."""
        if self.rule is None:
            if self._watched > 0:
                self._watched -= 1
                self._warn_of_new(microbatches)
            return None
        return shares(self.rule.counts(microbatches))

    def defined(self, microbatches: Sequence[Any], weights: Sequence[float] | None) -> list[Any]:
        """Micro-batches whose losses are all numbers.

        Where nothing counts the mean is 0 / 0, and so are its gradients, whatever they are multiplied by. Such a
        micro-batch gets one element that counts, by each of the rules: its loss weighs nothing.
        """
        if weights is None:
            return [*microbatches]
        return [
            part if weight else reduce(lambda batch, rule: rule.with_one(batch), self.rules, part)
            for part, weight in zip(microbatches, weights, strict=True)
        ]

    def _warn_of_new(self, microbatches: Sequence[Any]) -> None:
        """Labels of -100 that the first batch did not have in unequal numbers: what they weigh was not tried."""
        ways = {way for part in microbatches for way in countable(part) if way.kind == "labels"} - self._tried
        new = sorted(way for way in ways if len(set(way.counts(microbatches))) > 1)
        if new:
            self._watched = 0
            rank_zero_warn(
                f"{self.who}: micro-batches have different numbers of {new[0]}, which the batch at setup, if there"
                " was one, had not; so what they weigh is not known, and all weigh the same. Let the first batch be one"
                " with such labels, or keep their number equal, if the loss is a mean over tokens."
            )


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
    return float(stacked @ torch.tensor(mine).double())
