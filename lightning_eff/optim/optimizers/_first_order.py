"""What update rules of gradients alone share: their settings' checks, and a step over lists of tensors."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists


def check(who: str, *, betas: Sequence[float] = (), num_betas: int = 0, **positive: float) -> None:
    """Raise ``ValueError`` for settings that an update rule cannot have.

    Args:
        who: the rule.
        betas: decay rates, each in [0, 1).
        num_betas: how many.
        positive: the others, by name, >= 0.
    """
    for name, value in positive.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{who}({name}={value!r}): expected a finite number >= 0.")
    if len(betas) != num_betas or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{who}(betas={tuple(betas)}): expected {num_betas} numbers in [0, 1).")


def check_counts(who: str, **counts: int) -> None:
    """Raise ``ValueError`` for what must be an integer >= 1 and is not."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{who}({name}={value!r}): expected an integer >= 1.")


def keep_dtypes(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Give a state that was just loaded the dtypes that it was saved in: torch casts it to those of the parameters.

    Args:
        optimizer: what has loaded it.
        state_dict: what it has loaded.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in zip(ids, params, strict=True):
        for name, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor) and optimizer.state[p][name].dtype != value.dtype:
                optimizer.state[p][name] = value.to(p.device, copy=True)


class FirstOrder(Optimizer):
    """A rule that moves each parameter by its gradient and its own state; a subclass writes :meth:`update`."""

    @abstractmethod
    def begin(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first step."""

    @abstractmethod
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        """One step of ``params`` in place, and of what is in ``states``; ``grads`` must not be changed."""

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups.

        Args:
            closure: computes the loss anew, with gradients on, and returns it.

        Raises:
            ValueError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                params, grads = [], []
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    if p.grad.is_sparse:
                        raise ValueError(
                            f"{type(self).__name__}: the gradient of a parameter of shape {tuple(p.shape)} is sparse; expected"
                            " a dense one. Make its embedding dense, or leave it to another optimizer."
                        )
                    params.append(p)
                    grads.append(p.grad)
                    if not self.state[p]:
                        self.state[p] = self.begin(p)
                if params:
                    self.update(group, params, grads, [self.state[p] for p in params])
        return loss


def held(states: list[dict[str, Any]], name: str) -> list[Any]:
    """One entry of every state."""
    return [state[name] for state in states]


def count(states: list[dict[str, Any]]) -> list[int]:
    """The number of every parameter's step, from 1 on."""
    for state in states:
        state["step"] += 1
    return held(states, "step")


def ratio_of_norms(over: list[Tensor], under: list[Tensor]) -> list[Tensor]:
    """``|a| / |b|`` for each pair, scalars; 1 where either norm is zero."""
    found = []
    for a, b in zip(lists.norm(over), lists.norm(under), strict=True):
        found.append(torch.where((a > 0) & (b > 0), a / b, torch.ones_like(a)))
    return found
