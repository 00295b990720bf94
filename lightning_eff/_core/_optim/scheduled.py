"""Find the schedulers from ``configure_optimizers``, disable them, or attach them to a :class:`CombinedOptimizer`."""

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer


def optimizers_of(configured: Any) -> list[Optimizer]:
    """Return the optimizers in the result of ``configure_optimizers``, in any of Lightning's forms."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return optimizers_of(configured.get("optimizer"))
    if isinstance(configured, list | tuple):
        if _is_pair(configured):
            return [o for o in configured[0] if isinstance(o, Optimizer)]
        return [o for item in configured for o in optimizers_of(item)]
    return []


def schedulers_of(configured: Any) -> list[Any]:
    """Return the schedulers in the result of ``configure_optimizers``, without Lightning's settings for them."""
    found: list[Any] = []
    if isinstance(configured, dict):
        found = [configured["lr_scheduler"]] if configured.get("lr_scheduler") is not None else []
    elif isinstance(configured, list | tuple):
        if _is_pair(configured):
            found = list(configured[1]) if isinstance(configured[1], list | tuple) else [configured[1]]
        else:
            return [s for item in configured for s in schedulers_of(item)]
    return [s["scheduler"] if isinstance(s, dict) else s for s in found]


def _is_pair(configured: list[Any] | tuple[Any, ...]) -> bool:
    return len(configured) == 2 and isinstance(configured[0], list | tuple)


def reference_rates(optimizer: Optimizer, schedulers: list[Any]) -> list[float | None]:
    """Return each group's reference learning rate, which its schedule scales.

    This is ``max_lr`` of a cycle, otherwise the learning rate with which the group was created, before a scheduler's first
    value. None for a group without a learning rate.

    Args:
        optimizer: the module's optimizer.
        schedulers: its schedulers.
    """
    if isinstance(optimizer, CombinedOptimizer):
        added = [float(g["lr"]) if g.get("lr") is not None else None for g in optimizer.param_groups]
        known_ones = [how.full for how in optimizer.following]
        return [*known_ones, *added[len(known_ones) :]]
    peaks: list[Any] = [None] * len(optimizer.param_groups)
    for scheduler in schedulers:
        for one in all_in(scheduler, optimizer):
            highest = getattr(one, "max_lrs", None)
            if isinstance(highest, list) and len(highest) == len(peaks):
                peaks = highest
    found: list[float | None] = []
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        rates = (peak, group.get("max_lr"), group.get("initial_lr"), group.get("lr"), optimizer.defaults.get("lr"))
        known = [float(rate) for rate in rates if rate is not None]
        found.append(next((rate for rate in known if rate), known[0]) if known else None)
    return found


def all_in(scheduler: Any, optimizer: Optimizer) -> Iterator[Any]:
    """Yield ``scheduler`` and the schedulers inside it for one optimizer, outermost first."""
    waiting, seen = [scheduler], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen or getattr(one, "optimizer", None) is not optimizer:
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            waiting += [v for v in values if hasattr(v, "optimizer") and hasattr(v, "__dict__")]


class AtRest:
    """Mixed into the class of a scheduler to disable it."""

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because a technique sets the learning rates."""

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of the optimizer's groups."""
        return [group.get("lr") for group in self.optimizer.param_groups]


def put_to_rest(schedulers: list[Any]) -> None:
    """Disable ``schedulers``, but keep the objects for the module or Lightning."""
    for scheduler in schedulers:
        _add_to_class(scheduler, AtRest)


def _add_to_class(scheduler: Any, what: type) -> None:
    kind = type(scheduler)
    scheduler.__class__ = type(kind.__name__, (what, kind), {"__module__": kind.__module__})


class InProportion:
    """Mixed into a scheduler's class: it acts on the module's original groups, and the optimizer follows."""

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> Any:
        combined = self.optimizer
        with combined.moved():
            self.optimizer = combined.origins
            try:
                return super().step(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                self.optimizer = combined

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state, and the settings of the groups on which it acts."""
        return {**super().state_dict(), "origins": self.optimizer.origins.settings()}  # pyright: ignore[reportAttributeAccessIssue]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        own = {name: value for name, value in state_dict.items() if name != "origins"}
        super().load_state_dict(own)  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.origins.take(state_dict.get("origins", []))

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of the optimizer's groups."""
        return [group.get("lr") for group in self.optimizer.param_groups]


def put_around(combined: CombinedOptimizer, made: Optimizer, schedulers: list[Any]) -> None:
    """Attach ``schedulers``, created for ``made``, to ``combined``, so that each group keeps its own proportion.

    They stay the same objects of their own classes, and act as before on the module's original groups. Then the groups of
    ``combined`` follow.

    Raises:
        TypeError: for a scheduler whose class cannot be extended.
    """
    for scheduler in schedulers:
        for one in list(all_in(scheduler, made)):
            one.optimizer = combined.origins
        if not isinstance(scheduler, AtRest):
            _add_to_class(scheduler, InProportion)
        scheduler.optimizer = combined
