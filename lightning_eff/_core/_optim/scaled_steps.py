"""Optimizer steps with scaled learning rates, only for the duration of the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import set_rate
from lightning_eff._core._optim.external_rates import after_closure
from lightning_eff._core.optimizers import evaluates_anew


@dataclass
class _Held:
    """The learning rates of an optimizer's groups before a step, and the objects that scaled them."""

    rates: list[tuple[dict[str, Any], Any]]
    by: set[int] = field(default_factory=set)


_HELD: "WeakKeyDictionary[Optimizer, _Held]" = WeakKeyDictionary()


class ScaledSteps:
    """Multiplies every group's learning rate by ``factor()`` in each step of ``optimizers``.

    The groups have the scaled values only within ``step``. So schedulers, which may set a learning rate or multiply the present
    one, and code that reads the groups between steps are not affected. Several factors multiply.

    Args:
        optimizers: the optimizers.
        factor: called before each step; returns a number > 0.
    """

    def __init__(self, optimizers: Sequence[Optimizer], factor: Callable[[], float]) -> None:
        self._factor = factor
        self._optimizers = list(optimizers)
        self._anew = {id(optimizer) for optimizer in optimizers if evaluates_anew(optimizer)}
        self._hooks = [optimizer.register_step_pre_hook(self._raise) for optimizer in optimizers]
        self._hooks += [optimizer.register_step_post_hook(self._lower) for optimizer in optimizers]

    def _raise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if optimizer in _HELD and id(self) in _HELD[optimizer].by:  # the last step failed
            _put_back(optimizer)
        factor = self._factor()
        if factor == 1.0:
            return None
        changed = None
        if id(optimizer) not in self._anew:  # those read the learning rate before they run the closure
            changed = after_closure(args, kwargs, lambda: self._scale(optimizer, factor))
        if changed is None:
            self._scale(optimizer, factor)
        return changed

    def _scale(self, optimizer: Optimizer, factor: float) -> None:
        groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
        if optimizer not in _HELD:
            rates = [(g, g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"]) for g in groups]
            _HELD[optimizer] = _Held(rates)
        _HELD[optimizer].by.add(id(self))
        for group in groups:
            set_rate(group, float(group["lr"]) * factor)

    def _lower(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
        held = _HELD.get(optimizer)
        if held is not None and id(self) in held.by:
            held.by.remove(id(self))
            if not held.by:
                _put_back(optimizer)

    def remove(self) -> None:
        """Restore the optimizers."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers:
            if optimizer in _HELD and id(self) in _HELD[optimizer].by:
                _put_back(optimizer)


def _put_back(optimizer: Optimizer) -> None:
    for group, rate in _HELD.pop(optimizer).rates:
        if isinstance(rate, Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = rate
