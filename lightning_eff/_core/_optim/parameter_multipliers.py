"""Multiply the learning rate of some parameters in any optimizer of the module."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff._core._optim.no_weight_decay import add_group, move
from lightning_eff._core._optim.scheduled import all_in

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
#: Learning rates in torch's schedulers, with one entry per group.
_BY_GROUP = ("base_lrs", "_last_lr", "max_lrs")


def hasten(
    optimizer: Optimizer,
    schedulers: list[Any],
    parameters: Iterable[Tensor],
    factor: float,
    *,
    keep_decay: bool = False,
) -> list[Tensor]:
    """Move those of ``parameters`` that the optimizer has to separate groups with ``factor`` times the learning rate.

    Args:
        optimizer: an optimizer that has not stepped.
        schedulers: its schedulers, which treat the new groups like the original ones.
        parameters: parameters of which it may have some.
        factor: multiplies their learning rates.
        keep_decay: whether the product of learning rate and weight decay stays.

    Returns:
        The parameters whose learning rate changed.
    """
    chosen, found = {id(p) for p in parameters}, list[Tensor]()
    for at, group in enumerate(list(optimizer.param_groups)):
        mine = [p for p in group["params"] if id(p) in chosen]
        if not mine:
            continue
        found += mine
        names = {"param_names": []} if "param_names" in group else {}
        rates = {name: group[name] * factor for name in _RATES if group.get(name) is not None}
        decay = {"weight_decay": group["weight_decay"] / factor} if keep_decay and group.get("weight_decay") else {}
        home = {**group, **rates, **decay, "params": [], **names}
        if isinstance(optimizer, CombinedOptimizer):
            move(group, home, chosen)
            optimizer.split_group(at, home, factor)
            continue
        add_group(optimizer, schedulers, at, home, factor)
        move(group, home, chosen)
        for scheduler in schedulers:
            for one in all_in(scheduler, optimizer):
                for name in _BY_GROUP:
                    values = vars(one).get(name)
                    if isinstance(values, list) and len(values) == len(optimizer.param_groups):
                        values[-1] = values[-1] * factor
    return found
