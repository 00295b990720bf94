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
    """Compares the copies of parameters that ranks hold, after the forward pass of the first training step.

    Where a rank has changed one in place and all are still the same, later steps are looked at too.

    Args:
        group: the ranks; None for all.
        who: for messages.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, who: str) -> None:
        self.group, self.who = group, who
        self._names: set[str] | None = None  # to look at; None before the first step

    @property
    def done(self) -> bool:
        """Whether no step is to be looked at any more."""
        return self._names is not None and not self._names

    @contextmanager
    def looking(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Look at these, by name, around a training step's forward pass; collective over the group.

        Raises:
            ValueError: on all ranks, if the copies differ after it.
        """
        shown = {name: p for name, p in parameters.items() if self._names is None or name in self._names}
        if self.done:
            yield
            return
        before = {name: mark(p) for name, p in shown.items()}
        yield
        after = {name: mark(p) for name, p in shown.items()}
        mine = {name: float(after[name][1]) for name in changed(before, after)}
        ranks: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(ranks, mine, group=self.group)
        self._names = {name for rank in ranks for name in rank}
        apart = {name for name in self._names if len({rank.get(name) for rank in ranks}) > 1}
        if apart:
            raise ValueError(
                f"{self.who}: the forward pass changes {_listed(apart)} in place {_EXAMPLES}, by the samples of each rank,"
                f" so that ranks would train different weights. {_WAY_OUT}, or train on one device."
            )
