"""Parameters that weight decay passes over, in whatever optimizer the module has made."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.group_multipliers import follow
from lightning_eff._core._optim.scheduled import all_in

#: What torch's schedulers keep with an entry for each group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def exempt(optimizer: Optimizer, schedulers: list[Any], parameters: list[Tensor]) -> list[Tensor]:
    """Put those of ``parameters`` that decay into groups that do not, with all other settings of the groups they were in.

    A group of the optimizer with the same settings but for its decay takes them, where there is one; else a new one is put
    behind the others, and the schedulers, which keep lists with an entry for each group, get an entry for it.

    Args:
        optimizer: that has stepped nothing yet, and is not of several parts.
        schedulers: around it.
        parameters: of which it may have some.

    Returns:
        Those that were put elsewhere.
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
    """Let ``home`` have the parameters of ``group`` that are chosen, with their names where groups have any."""
    held = list(group["params"])
    for key in ("param_names", "params"):
        if key in group:
            pairs = list(zip(group[key], held, strict=True))
            home.setdefault(key, []).extend(value for value, p in pairs if id(p) in chosen)
            group[key] = [value for value, p in pairs if id(p) not in chosen]


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two groups have the same settings but for what they hold, what they are called and their decay."""
    own = {"params", "param_names", "weight_decay", "name"}
    return {k: repr(v) for k, v in a.items() if k not in own} == {k: repr(v) for k, v in b.items() if k not in own}


def add_group(optimizer: Optimizer, schedulers: list[Any], at: int, group: dict[str, Any], ratio: float = 1.0) -> None:
    """Add ``group``, whose rate goes as ``ratio`` times that of the group at ``at``, also where somebody writes it by hand."""
    count = len(optimizer.param_groups)
    optimizer.param_groups.append(group)
    for scheduler in schedulers:
        for one in list(all_in(scheduler, optimizer)):
            for name in _BY_GROUP:
                values = vars(one).get(name)
                if isinstance(values, list | tuple) and len(values) == count:
                    vars(one)[name] = [*values, values[at]]
    follow(optimizer, schedulers, at, ratio)
