"""Exempt parameters from weight decay in any optimizer of the module."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.group_multipliers import follow_group
from lightning_eff._core._optim.scheduled import all_in

#: Attributes of torch's schedulers with one entry per group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def exempt_from_decay(optimizer: Optimizer, schedulers: list[Any], parameters: list[Tensor]) -> list[Tensor]:
    """Move those of ``parameters`` that decay to groups without weight decay, with otherwise the same settings.

    An existing group with the same settings except the decay gets them. Otherwise a new group is appended, and the schedulers'
    lists get an entry for it.

    Args:
        optimizer: an optimizer that has not stepped, and is not a combined one.
        schedulers: its schedulers.
        parameters: parameters of which it may have some.

    Returns:
        The moved parameters.
    """
    chosen, moved = {id(p) for p in parameters}, list[Tensor]()
    for at, group in enumerate(list(optimizer.param_groups)):
        mine = [p for p in group["params"] if id(p) in chosen] if group.get("weight_decay") else []
        if not mine:
            continue
        moved += mine
        if len(mine) == len(group["params"]):
            group["weight_decay"] = 0.0
            continue
        home = next((g for g in optimizer.param_groups if not g.get("weight_decay") and _alike(g, group)), None)
        if home is None:
            home = {
                **group,
                "params": [],
                "weight_decay": 0.0,
                **({"param_names": []} if "param_names" in group else {}),
            }
            add_group(optimizer, schedulers, at, home)
        move(group, home, chosen)
    return moved


def move(group: dict[str, Any], home: dict[str, Any], chosen: set[int]) -> None:
    """Move the chosen parameters of ``group`` to ``home``, with their names if groups have names."""
    held = list(group["params"])
    for key in ("param_names", "params"):
        if key in group:
            pairs = list(zip(group[key], held, strict=True))
            home.setdefault(key, []).extend(value for value, p in pairs if id(p) in chosen)
            group[key] = [value for value, p in pairs if id(p) not in chosen]


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two groups have the same settings apart from their parameters, names and decay."""
    own = {"params", "param_names", "weight_decay", "name"}
    return {k: repr(v) for k, v in a.items() if k not in own} == {k: repr(v) for k, v in b.items() if k not in own}


def add_group(optimizer: Optimizer, schedulers: list[Any], at: int, group: dict[str, Any], ratio: float = 1.0) -> None:
    """Add ``group``, whose learning rate follows that of group ``at`` times ``ratio``, also if other code writes it."""
    count = len(optimizer.param_groups)
    optimizer.param_groups.append(group)
    for scheduler in schedulers:
        for one in list(all_in(scheduler, optimizer)):
            for name in _BY_GROUP:
                values = vars(one).get(name)
                if isinstance(values, list | tuple) and len(values) == count:
                    vars(one)[name] = [*values, values[at]]
    follow_group(optimizer, schedulers, at, ratio)
