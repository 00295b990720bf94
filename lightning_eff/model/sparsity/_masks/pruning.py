"""The smallest of the weights that are left are masked: of all together, or of each weight by itself."""

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor

from lightning_eff._core.session import Session
from lightning_eff.model.sparsity._masks.finding import largest
from lightning_eff.model.sparsity._masks.masked import Masked, agreed

Scope = Literal["global", "layer"]


def check_scope(scope: object, *, who: str) -> Scope:
    """``scope``, or ``ValueError`` where it is none."""
    if scope not in ("global", "layer"):
        raise ValueError(f"{who}({scope=}): expected 'global' or 'layer'.")
    return cast(Scope, scope)


def num_survivors(total: int, *, share: float, rounds: int) -> int:
    """``round(n (1 - p)^r)``: how many of ``n`` numbers are left after ``r`` rounds that prune the share ``p`` each."""
    return max(round(total * (1.0 - share) ** rounds), 1)


@torch.no_grad()
def smallest_masked(
    technique: Masked, session: Session, scope: Scope, count: Callable[[int], int]
) -> dict[str, Tensor]:
    """The next masks, which keep the largest of those that the present ones keep; the same on all ranks.

    Args:
        technique: whose masks they are.
        session: the run.
        scope: "global", of all weights together; "layer", of each by itself.
        count: how many of so many numbers are kept.
    """
    sizes = {
        name: agreed(session, technique.parameter(name).detach().abs().float()).masked_fill(~mask, -1.0)
        for name, mask in technique.masks.items()
    }
    groups = [[*sizes]] if scope == "global" else [[name] for name in sizes]
    masks: dict[str, Tensor] = {}
    for names in groups:
        every = torch.cat([sizes[name].flatten() for name in names])
        parts = largest(every, count(every.numel())).split([sizes[name].numel() for name in names])
        masks |= {name: part.view(sizes[name].shape) for name, part in zip(names, parts, strict=True)}
    return masks
