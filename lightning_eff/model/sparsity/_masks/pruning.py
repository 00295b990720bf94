"""Masks the smallest of the weights that are left, in each network or in each weight."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_eff._core.session import Session
from lightning_eff.model.sparsity._masks.arguments import Scope
from lightning_eff.model.sparsity._masks.finding import largest
from lightning_eff.model.sparsity._masks.masked import Masked, agreed


def num_survivors(total: int, *, share: float, rounds: float) -> int:
    """``round(n (1 - p)^r)``, at least 1: the rest of ``n`` elements after ``r`` prunings by a fraction ``p``."""
    return max(round(total * (1.0 - share) ** rounds), 1)


@torch.no_grad()
def smallest_masked(
    technique: Masked, session: Session, scope: Scope, count: Callable[[int], int]
) -> dict[str, Tensor]:
    """The next masks: those that keep the largest of the weights that the present masks keep, the same on all ranks.

    Args:
        technique: the technique with the present masks.
        session: the run.
        scope: "global" compares all weights of an optimizer together, "layer" each weight separately.
        count: the number to keep, given the number of elements.
    """
    sizes = {
        name: agreed(session, technique.parameter(name).detach().abs().float()).masked_fill(~mask, -1.0)
        for name, mask in technique.masks.items()
    }
    groups = technique.together() if scope == "global" else [[name] for name in sizes]
    masks: dict[str, Tensor] = {}
    for names in groups:
        every = torch.cat([sizes[name].flatten() for name in names])
        parts = largest(every, count(every.numel())).split([sizes[name].numel() for name in names])
        masks |= {name: part.view(sizes[name].shape) for name, part in zip(names, parts, strict=True)}
    return masks
