"""Ways to count in a micro-batch: elements of its tensors that are not padding, or the sum of weights in it."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_eff._core.batches import map_tensors, tensors

ALWAYS = (-100.0, -1.0, 0.0, 1.0)  # usual marks of padding, in addition to those that a step was seen to compare with


class Count(NamedTuple):
    """A way to count the elements of one tensor.

    Attributes:
        path: path of the tensor in the batch; its dimension 0 has the samples.
        kind: "not" counts elements other than ``value``, "from" those of at least ``value``, "numbers" those that are not
            NaN. "sum" adds the elements.
        value: see above; 0 if unused.
        shifted: without the first position of each sample, for labels shifted against logits. In a sum of one number per
            sample (its length), each number counts minus one.
    """

    path: str
    kind: Literal["not", "from", "numbers", "sum"]
    value: float
    shifted: bool

    def __str__(self) -> str:
        where = f"batch{self.path}"
        if self.kind == "sum":
            return f"the sum of {where}" + (", less one for each sample or its first position" if self.shifted else "")
        if self.kind == "numbers":
            what = f"elements of {where} that are not NaN"
        else:
            what = f"elements of {where} that are {'not' if self.kind == 'not' else 'at least'} {self.value:g}"
        return what + (", but for the first position" if self.shifted else "")

    def of(self, t: Tensor) -> Tensor:
        """Return how much each element counts, float64, in the tensor's shape (without a position if shifted)."""
        if self.shifted and t.ndim > 1:
            t = t[:, 1:]
        if self.kind == "not":
            return t.ne(self.value).double()
        if self.kind == "from":
            return t.ge(self.value).double()
        if self.kind == "numbers":
            return t.isnan().logical_not().double()
        return (t.double() - 1).clamp(min=0) if self.shifted and t.ndim == 1 else t.double()


class Rule(NamedTuple):
    """The elements that a loss averages: those that count by all of ``counts``, or samples without ``counts``.

    ``adds`` means that the loss is a sum, so that the losses of micro-batches are added.
    """

    counts: tuple[Count, ...] = ()
    adds: bool = False

    def __str__(self) -> str:
        if self.adds:
            return "samples, over which it is a sum"
        return " and ".join(map(str, self.counts)) or "samples"

    def amounts(self, batches: Iterable[Any]) -> list[float]:
        """Return the count in each batch, or 0 if it has no such tensor."""
        found = [self._amount(batch) for batch in batches]
        device = next((amount.device for amount in found if amount.device.type != "cpu"), None)
        return torch.stack(
            [amount.to(device) for amount in found]
        ).tolist()  # one copy, since each waits for the device

    def _amount(self, batch: Any) -> Tensor:
        if not self.counts:
            return torch.ones((), dtype=torch.float64)
        held = dict(tensors(batch))
        if any(count.path not in held for count in self.counts):
            return torch.zeros((), dtype=torch.float64)
        marks = [count.of(held[count.path]) for count in self.counts]
        if any(mark.shape != marks[0].shape for mark in marks):
            return torch.full((), torch.nan, dtype=torch.float64)
        return torch.stack(marks).prod(0).sum() if len(marks) > 1 else marks[0].sum()

    def with_one(self, batch: Any, others: Sequence[Any]) -> Any:
        """Return a copy of the batch in which the last element of each tensor counts.

        Args:
            batch: the batch.
            others: batches, some with elements that count.
        """
        instead: dict[int, tuple[int, Tensor]] = {}
        held = dict(tensors(batch))
        for count in self.counts:
            for other in others:
                theirs = dict(tensors(other)).get(count.path)
                if theirs is None:
                    continue
                counting = Count(count.path, count.kind, count.value, False).of(theirs).reshape(-1) > 0
                if bool(counting.any()):
                    place = int(counting.nonzero()[-1])
                    instead[id(held[count.path])] = place, theirs.reshape(-1)[place]
                    break

        def changed(t: Tensor) -> Tensor:
            if id(t) not in instead:
                return t
            t, value = t.clone(memory_format=torch.contiguous_format), instead[id(t)][1]
            t.view(-1)[-1] = value
            return t

        return map_tensors(batch, changed)


EQUAL, ADDED = Rule(), Rule(adds=True)


def held_by_sample(batch: Any, size: int) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch with one row for each of ``size`` samples, each tensor once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, t in tensors(batch):
        if t.ndim > 0 and t.shape[0] == size and not t.is_complex():
            found.setdefault(id(t), (path, t))
    return list(found.values())


def values_for(t: Tensor, seen: Iterable[float]) -> list[float]:
    """Return possible marks of padding in a tensor of this type: usual ones, and those ``seen`` in a step."""
    if t.dtype == torch.bool:
        return [0.0, 1.0]
    if t.is_floating_point():
        return list(dict.fromkeys([0.0, *seen]))
    info = torch.iinfo(t.dtype)
    return [v for v in dict.fromkeys([*ALWAYS, *seen]) if v == int(v) and info.min <= v <= info.max]


def candidates(batch: Any, size: int, seen: Iterable[float]) -> list[Rule]:
    """Return every rule with one count that is possible for batches like this."""
    found, seen = [EQUAL, ADDED], [*seen]
    for path, t in held_by_sample(batch, size):
        counts = [("not", value) for value in values_for(t, seen)]
        if t.dtype != torch.bool:
            counts += [("from", value) for value in dict.fromkeys([0.0, 1.0, *seen, *(value + 1 for value in seen)])]
        if t.is_floating_point():
            counts += [("numbers", 0.0)]
        counts += [("sum", 0.0)]
        shifts = (False, True) if t.ndim > 1 or t.dtype != torch.bool else (False,)
        for kind, value in counts:
            for shifted in shifts if t.ndim > 1 or kind == "sum" else (False,):
                found.append(Rule((Count(path, kind, value, shifted),)))  # pyright: ignore[reportArgumentType]
    return found


def joined(rules: Sequence[Rule], batch: Any) -> list[Rule]:
    """Return rules with two counts, of tensors of one shape."""
    held = dict(tensors(batch))
    singles = list(dict.fromkeys(count for rule in rules for count in rule.counts))
    return [
        Rule((first, second))
        for i, first in enumerate(singles)
        for second in singles[i + 1 :]
        if first.shifted == second.shifted and held[first.path].shape == held[second.path].shape
    ]
