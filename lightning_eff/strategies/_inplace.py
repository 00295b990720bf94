"""Parameters that a forward pass changes in place (``nn.Embedding(max_norm=...)``, a clamp of weights): found by looking.

Where each rank has a copy, a change that follows from its own samples lets ranks drift apart; where a copy is put together
for the pass, the change is lost with it. Version counters and sums of values tell, in the first training step, before any
weight has moved.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff._core.steps import looking as beside

_EXAMPLES = "(an nn.Embedding with max_norm, a clamp of weights)"
_WAY_OUT = "Change the weights in on_train_batch_end, the same on every rank"


Mark = tuple[int, Tensor]


@torch.no_grad()
def mark(tensor: Tensor) -> Mark:
    """The version of a tensor, which changes in place raise, and a number of its values, which ``.data`` changes too."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    held = torch.view_as_real(held.detach()) if held.is_complex() else held.detach()
    value = held.sum(dtype=torch.float64)
    if held.is_floating_point():
        value = value / 3 + torch.linalg.vector_norm(held, dtype=torch.float64)
    return tensor._version, value.nan_to_num()


def differ(before: Mark, after: Mark) -> bool:
    """Whether a tensor was changed in place between two marks."""
    return before[0] != after[0] or bool(before[1] != after[1])


def changed(before: Mapping[str, Mark], after: Mapping[str, Mark]) -> list[str]:
    """The names whose marks differ."""
    return [name for name, then in before.items() if differ(then, after[name])]


def marks(module: nn.Module) -> dict[str, Mark]:
    """The mark of each parameter that has memory."""
    return {name: mark(p) for name, p in module.named_parameters() if not p.is_meta}


def lost(names: Iterable[str], where: str, *, who: str) -> ValueError:
    """What to say of parameters whose changes in place are lost ``where``."""
    return ValueError(
        f"{who}: the forward pass changes {_listed(names)} in place {_EXAMPLES}, and {where}, so the change is lost."
        f" {_WAY_OUT}, or train on one device."
    )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Copies:
    """Compares the copies of parameters that ranks hold, after the first training step.

    If a rank has changed one in place and all copies are still the same, later steps are compared too. What a technique
    writes to weights around the module's own ``training_step`` does not count: :meth:`own_step` stands around that alone.

    Args:
        group: the ranks; None for all.
        who: for messages.
        why: how copies come to differ, for the message.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, who: str, why: str = "by the samples of each rank") -> None:
        self.group, self.who, self.why = group, who, why
        self._names: set[str] = set()  # to compare in steps to come
        self._complete = False  # whether every rank has run its own step since the run began
        self._ran = False
        self._shown: Mapping[str, Tensor] | None = None  # within a step
        self._begun: dict[str, Mark] = {}
        self._values: dict[str, float | None] = {}

    @property
    def done(self) -> bool:
        """Whether no step is to be compared any more."""
        return self._complete and not self._names

    @contextmanager
    def looking(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Compare these, by name, after a training step of all ranks; collective over the group.

        Raises:
            ValueError: on all ranks, if the copies differ after it.
        """
        if self.done:
            yield
            return
        shown = {name: p for name, p in parameters.items() if not self._complete or name in self._names}
        self._begun, self._values = {name: mark(p) for name, p in shown.items()}, {}
        self._shown = shown
        try:
            yield
        finally:
            self._shown = None
        ranks: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(ranks, (self._ran, [*shown], self._values), group=self.group)
        self._complete = all(ran for ran, _, _ in ranks)
        found = {name for _, _, values in ranks for name in values}
        self._names |= found
        apart = {name for name in found if len(set(_comparable(ranks, name))) > 1}
        if apart:
            raise ValueError(
                f"{self.who}: the forward pass changes {_listed(apart)} in place {_EXAMPLES}, {self.why},"
                f" so that ranks would train different weights. {_WAY_OUT}, or train on one device."
            )

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """Around the module's own step, in which alone changes count; a step may have several passes, or none.

        Passes beside training do not count, since techniques try other weights in them.
        """
        if (shown := self._shown) is None or beside():
            yield
            return
        before = {name: mark(p) for name, p in shown.items()}
        yield
        self._ran = True
        after = {name: mark(p) for name, p in shown.items()}
        for name in changed(before, after):
            # at perturbed weights, which may be another on each rank, the value tells nothing
            first = bool(before[name][1] == self._begun[name][1])
            if first or self._values.get(name) is None:
                self._values[name] = float(after[name][1]) if first else None


def _comparable(ranks: Iterable[tuple[bool, list[str], Mapping[str, float | None]]], name: str) -> Iterator[Any]:
    """What ranks that hold a parameter found its values to be; "as it was" where it was not changed."""
    for ran, held, values in ranks:
        if ran and name in held and values.get(name, 0.0) is not None:
            yield values.get(name, "as it was")
