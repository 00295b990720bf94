"""Groups of a plain optimizer whose learning rates are multiples of those that the module sets."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_eff._core._optim.combined import set_rate
from lightning_eff._core._optim.external_rates import Known, Share, Telling, interpret, settle, watch, watches
from lightning_eff._core._optim.scheduled import all_in


class Multiples:
    """Keeps groups in proportion when other code writes learning rates; schedulers have their own lists for this.

    Args:
        optimizer: the optimizer, not a combined one.
        schedulers: its schedulers.
        shares: what each group follows; None for a group that follows nothing.
    """

    def __init__(self, optimizer: Optimizer, schedulers: list[Any], shares: list[Share | None]) -> None:
        self.optimizer, self.schedulers, self.shares = optimizer, schedulers, shares
        self.absolute = False  # whether written learning rates were the module's own, and not multiples
        self._telling = Telling()
        self.settle()

    def settle(self) -> None:
        """Record the present learning rates of all groups as known."""
        self._known = Known(self.optimizer.param_groups)

    def look(self, stepping: bool = False) -> None:
        """Accept learning rates that other code has written into the groups."""
        groups = self.optimizer.param_groups
        now = self._known.changed(groups)
        if not now:
            return
        if not scheduled(self.optimizer, self.schedulers, now):
            meant = interpret(self.shares[: len(groups)], self._known.rates, now, self.absolute)
            self._telling.say(meant)
            found, self.absolute = meant.rates, meant.absolute
            for group, share in zip(groups, self.shares, strict=False):
                if share is not None and share.origin in found:
                    set_rate(group, found[share.origin] * share.ratio)
        settle(self.optimizer)


def scheduled(optimizer: Optimizer, schedulers: Iterable[Any], now: Mapping[int, float]) -> bool:
    """Return whether one of ``schedulers`` has set the learning rates ``now``, by index of their group."""
    for scheduler in schedulers:
        for one in all_in(scheduler, optimizer):
            last = getattr(one, "_last_lr", None)
            if isinstance(last, list) and all(i < len(last) and float(last[i]) == rate for i, rate in now.items()):
                return True
    return False


def follow_group(optimizer: Optimizer, schedulers: list[Any], at: int, ratio: float) -> None:
    """Make the last group of ``optimizer``, which is new, follow group ``at`` with ``ratio`` times its learning rate."""
    found = next((one for one in watches(optimizer) if isinstance(one, Multiples)), None)
    if found is None:
        found = Multiples(optimizer, schedulers, [])
        watch(optimizer, found)
    count = len(optimizer.param_groups)
    found.shares += [Share(i, 1.0) for i in range(len(found.shares), count - 1)]
    home = found.shares[at]
    origin, factor = (at, 1.0) if home is None else (home.origin, home.ratio)
    found.shares.append(Share(origin, factor * ratio))
    found.settle()
