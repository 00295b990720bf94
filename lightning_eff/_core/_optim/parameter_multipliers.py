"""Parameters whose rate is a multiple of their group's, in whatever optimizer the module has made."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.no_weight_decay import add_group, move
from lightning_eff._core._optim.scheduled import all_in

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
#: What torch's schedulers keep of rates, with an entry for each group.
_BY_GROUP = ("base_lrs", "_last_lr", "max_lrs")


def hasten(optimizer: Optimizer, schedulers: list[Any], parameters: Iterable[Tensor], factor: float) -> list[Tensor]:
    """Put those of ``parameters`` that it holds into groups of their own, whose rates are ``factor`` times as high.

    Args:
        optimizer: that has stepped nothing yet, and is not of several parts.
        schedulers: around it, which go on with the new groups as with those that they come from.
        parameters: of which it may have some.
        factor: of their rates.

    Returns:
        Those that have another rate now.
    """
    chosen, found = {id(p) for p in parameters}, list[Tensor]()
    for at, group in enumerate(list(optimizer.param_groups)):
        mine = [p for p in group["params"] if id(p) in chosen]
        if not mine:
            continue
        found += mine
        names = {"param_names": []} if "param_names" in group else {}
        rates = {name: group[name] * factor for name in _RATES if group.get(name) is not None}
        home = {**group, **rates, "params": [], **names}
        add_group(optimizer, schedulers, at, home, factor)
        move(group, home, chosen)
        for scheduler in schedulers:
            for one in all_in(scheduler, optimizer):
                for name in _BY_GROUP:
                    values = vars(one).get(name)
                    if isinstance(values, list) and len(values) == len(optimizer.param_groups):
                        values[-1] = values[-1] * factor
    return found
