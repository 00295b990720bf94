"""Learning rates that a technique sets for all groups, and restores if other code overwrites them."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import set_rate
from lightning_eff._core._optim.external_rates import Known, settle, unwatch, watch
from lightning_eff._core._optim.group_multipliers import scheduled


class HeldRates:
    """Sets learning rates, and restores them before a step if other code has written others, with one warning.

    Args:
        who: the technique that sets them.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._held: dict[int, _Held] = {}
        self._warned = False

    def set(
        self, optimizer: Optimizer, bases: list[float | None], factor: float, schedulers: Iterable[Any] = ()
    ) -> None:
        """Set each group's learning rate to ``factor`` times its base; groups added later get an entry in ``bases``.

        Args:
            optimizer: the optimizer.
            bases: by group; None for a group without a learning rate.
            factor: multiplies all bases.
            schedulers: active schedulers, whose learning rates are overridden without a warning.
        """
        groups = optimizer.param_groups
        held = self._held.get(id(optimizer))
        now = {} if held is None else held.between.changed(groups)
        written = not scheduled(optimizer, schedulers, now) and next(iter(now.values()), None)
        for group in groups[len(bases) :]:  # other code has unfrozen parameters since
            bases.append(None if group.get("lr") is None else float(group["lr"]))
        for group, base in zip(groups, bases, strict=False):
            if base is not None:
                set_rate(group, base * factor)
        if id(optimizer) not in self._held:
            self._held[id(optimizer)] = _Held(optimizer, self)
            watch(optimizer, self._held[id(optimizer)])
        self._held[id(optimizer)].known.take(groups)
        settle(optimizer)
        if written:
            self.warn(written, float(groups[next(iter(now))]["lr"]))

    def release(self) -> None:
        """Stop restoring learning rates."""
        for one in self._held.values():
            unwatch(one.optimizer, one)
        self._held.clear()
        self._warned = False

    def warn(self, written: float, ours: float) -> None:
        """Warn once about the overridden learning rate."""
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{self._who}: the module or another callback wrote a learning rate of {written:g} into"
                f" optimizer.param_groups, and {self._who} overrides it with {ours:g}, as it does with schedulers. Remove the"
                f" code that writes param_groups[...]['lr'], or remove {self._who} from the trainer's callbacks."
            )


class _Held:
    """The learning rates of one optimizer."""

    def __init__(self, optimizer: Optimizer, rates: HeldRates) -> None:
        self.optimizer, self._rates = optimizer, rates
        self.known = Known(optimizer.param_groups)
        self.between = Known(optimizer.param_groups)  # the values that techniques and schedulers set since

    def settle(self) -> None:
        """Record learning rates that techniques or schedulers have set, until :meth:`HeldRates.set` overrides them."""
        self.between.take(self.optimizer.param_groups)

    def look(self, stepping: bool = False) -> None:
        """Restore the learning rates at the beginning of a step; between steps, schedulers may set others."""
        if not stepping:
            return
        groups = self.optimizer.param_groups
        now = self.known.changed(groups)
        for i, written in now.items():
            ours = self.known.rates[i]
            assert ours is not None
            self._rates.warn(written, ours)
            set_rate(groups[i], ours)
        if now:
            settle(self.optimizer)
