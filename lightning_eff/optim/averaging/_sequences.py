"""The three sequences of schedule-free learning, around any optimizer's step (Defazio et al. 2024, arXiv:2405.15682)."""

# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_eff._core._optim.chunks import chunks, local

PROGRESS = ("k", "lr_max", "weight_sum")  # what is kept for a group
_FUSED = (torch.float32, torch.float64)  # in others, the kernel computes with fewer roundings


class Sequences:
    """The sequences ``y`` (the parameters) and ``z`` around the module's optimizer, which makes its steps at ``z``.

    The optimizer's state therefore stays that of a plain run, and loads into one.

    Args:
        optimizer: the module's optimizer.
        step: the optimizer's own step, without a closure.
        momentum: the interpolation's momentum, ``beta``.
        power: the exponent of the step number in a step's weight.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any], momentum: float, power: float) -> None:
        self.optimizer, self._step = optimizer, step
        self.momentum, self.power = momentum, power
        self.z: dict[Tensor, Tensor] = {}  # by parameter
        self.param_groups: list[dict[str, Any]] = []
        self.look()

    def look(self) -> None:
        """Take over the optimizer's current parameter groups."""
        groups = self.optimizer.param_groups
        self.param_groups += [{} for _ in groups[len(self.param_groups) :]]  # groups that were added in the meantime
        for group, own in zip(groups, self.param_groups, strict=True):
            # learning rates are weights of the average here, and their sum must not be zero
            own |= {"params": group["params"], "lr": float(group.get("lr", 1.0)) or 1e-30}

    @torch.no_grad()
    def step(self) -> None:
        """Make a step of the optimizer from ``z``, with gradients at ``y``, and update ``y``."""
        beta = self.momentum
        moving = [self._moving(group["params"]) for group in self.param_groups]
        for held in moving:
            for y, z in chunks(*held):
                # x = y + (1 − 1/β) (z − y); the parameters become z, and x takes its place
                x = torch._foreach_lerp(y, z, 1 - 1 / beta)
                torch._foreach_copy_(y, z)
                torch._foreach_copy_(z, x)
        with without_momentum(self.optimizer):
            self._step()
        for group, held in zip(self.param_groups, moving, strict=True):
            c = self._weigh(group)
            for z, x in chunks(*held):
                # x = (1 − c) x + c z;  y = (1 − β) z + β x
                torch._foreach_lerp_(x, z, c)
                y = torch._foreach_lerp(x, z, 1 - beta)
                torch._foreach_copy_(x, z)
                torch._foreach_copy_(z, y)

    def _moving(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that have gradients, and their ``z``, which begin at the parameters."""
        moved = [p for p in params if p.grad is not None]
        for p in moved:
            if p not in self.z:
                self.z[p] = p.clone(memory_format=torch.preserve_format)
        return local(moved, moved), local([self.z[p] for p in moved], moved)

    def _weigh(self, group: dict[str, Any]) -> float:
        """Count a step of this group, and return its weight relative to the sum of all weights so far."""
        k, lr_max = group.get("k", 0), max(group["lr"], group.get("lr_max", 0.0))
        weight = (k + 1) ** self.power * lr_max**2
        group |= {"k": k + 1, "lr_max": lr_max, "weight_sum": group.get("weight_sum", 0.0) + weight}
        return weight / group["weight_sum"]


@contextmanager
def without_momentum(optimizer: Optimizer) -> Iterator[None]:
    """Set ``momentum`` and the first beta to zero in every group: the average's interpolation replaces them.

    On a CPU, Adam and AdamW also use torch's fused kernel, where the user left this to torch: it is two to three times as fast.
    """
    names = ("momentum", "nesterov", "betas", *(("fused",) if _fuses(optimizer) else ()))
    kept = [{k: group[k] for k in names if k in group} for group in optimizer.param_groups]
    zero = {"momentum": 0.0, "nesterov": False, "fused": True}
    try:
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group.update({k: zero[k] for k in own if k != "betas"})
            if own.get("betas"):
                group["betas"] = (0.0, *own["betas"][1:])
        yield
    finally:
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group.update(own)


def _fuses(optimizer: Optimizer) -> bool:
    """Whether torch's fused kernel for a CPU computes the same step, and the user has asked for no other implementation."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    for group in optimizer.param_groups:
        chosen = (group.get(k) for k in ("foreach", "fused", "capturable", "differentiable"))
        if (
            any(chosen)
            or group.get("foreach") is False
            or group.get("fused") is False
            or isinstance(group["lr"], Tensor)
        ):
            return False
    # the kernel goes through memory, so a gradient in another layout would reach other weights
    return all(
        p.is_contiguous() and g.is_contiguous() and p.dtype in _FUSED and p.is_cpu and not isinstance(p, DTensor)
        for group in optimizer.param_groups
        for p in group["params"]
        if (g := p.grad) is not None
    )
