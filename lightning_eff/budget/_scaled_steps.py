"""Optimizer steps at another rate than the groups say: a factor for the length of the step alone."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import set_rate


class ScaledSteps:
    """Lets each step of ``optimizers`` be made with every group's rate times ``factor()``.

    The groups hold the scaled rates within ``step`` alone: schedulers, which may set a rate or multiply the one they find,
    and whoever looks at the groups between steps go on as they would without it.

    Args:
        optimizers: whose steps they are.
        factor: called before each step, > 0.
    """

    def __init__(self, optimizers: Sequence[Optimizer], factor: Callable[[], float]) -> None:
        self._factor = factor
        self._own: dict[int, list[tuple[dict[str, Any], Any]]] = {}  # by optimizer: its groups, with their rates
        self._hooks = [optimizer.register_step_pre_hook(self._raise) for optimizer in optimizers]
        self._hooks += [optimizer.register_step_post_hook(self._lower) for optimizer in optimizers]

    def _raise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._lower(optimizer)  # a step that failed
        factor = self._factor()
        if factor == 1.0:
            return
        own = self._own[id(optimizer)] = []
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is not None:
                own.append((group, rate.clone() if isinstance(rate, Tensor) else rate))
                set_rate(group, float(rate) * factor)

    def _lower(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
        for group, rate in self._own.pop(id(optimizer), []):
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def remove(self) -> None:
        """Leave the optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
        for own in self._own.values():
            for group, rate in own:
                set_rate(group, float(rate))
        self._own = {}
