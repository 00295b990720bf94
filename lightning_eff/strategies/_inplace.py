"""Finds parameters that a forward pass changes in place, such as by ``nn.Embedding(max_norm=...)`` or a clamp of weights.

If each rank has a copy, a change that depends on its samples makes the copies differ. If a copy is gathered only for the pass,
the change is lost. The check compares version counters and sums of values in the first training step, before any weight moves.
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
    """Return the tensor's version, which in-place changes increase, and a value that changes through ``.data`` too."""
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
    """Return the names whose marks differ."""
    return [name for name, then in before.items() if differ(then, after[name])]


def marks(module: nn.Module) -> dict[str, Mark]:
    """Return the mark of each parameter that has memory."""
    return {name: mark(p) for name, p in module.named_parameters() if not p.is_meta}


def lost(names: Iterable[str], where: str, *, who: str) -> ValueError:
    """Return the error for parameters whose in-place changes are lost; ``where`` says why."""
    return ValueError(
        f"{who}: the forward pass changes {_listed(names)} in place {_EXAMPLES}, and {where}, so the change is lost."
        f" {_WAY_OUT}, or train on one device."
    )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Copies:
    """Compares the ranks' copies of parameters after the first training step.

    If a rank changed one in place and all copies are still equal, it compares later steps too. Only changes within
    :meth:`own_step` count, so techniques may change weights around the module's ``training_step``.

    Args:
        group: the ranks; None means all.
        who: name of the caller in messages.
        why: reason in the message for copies that differ.
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
        """Whether no further step needs a comparison."""
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
        """Return the context of the module's own step, in which changes count. A step can have several passes or none.

        Passes outside training do not count, since techniques try other weights in them.
        """
        if (shown := self._shown) is None or beside():
            yield
            return
        before = {name: mark(p) for name, p in shown.items()}
        yield
        self._ran = True
        after = {name: mark(p) for name, p in shown.items()}
        for name in changed(before, after):
            # perturbed weights can differ between ranks, so their values say nothing
            first = bool(before[name][1] == self._begun[name][1])
            if first or self._values.get(name) is None:
                self._values[name] = float(after[name][1]) if first else None


def _comparable(ranks: Iterable[tuple[bool, list[str], Mapping[str, float | None]]], name: str) -> Iterator[Any]:
    """Yield the values of a parameter on the ranks that hold it, or "as it was" if it did not change."""
    for ran, held, values in ranks:
        if ran and name in held and values.get(name, 0.0) is not None:
            yield values.get(name, "as it was")
