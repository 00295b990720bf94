"""Adan: Adam with Nesterov momentum, expressed by differences of gradients (Xie et al. 2022)."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Each, Fraction
from lightning_eff._core._optim.chunks import chunks, local
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Eps, FirstOrder, Rate, by_step, held, picked

_STATE = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")


class Adan(FirstOrder):
    """Adam with Nesterov momentum, estimated from differences of consecutive gradients.

    For a parameter ``w`` with gradients ``g`` and, in the step before, ``g'`` (equal to ``g`` in the first step)::

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) (g - g')
        n = b3 n + (1 - b3) (g + b2 (g - g'))^2
        w = (w - lr (m^ + b2 v^) / (sqrt(n^) + eps)) / (1 + lr lambda)

    with ``^`` for division by ``1 - b^t``. If gradients do not change, a step is ``-lr sign(g)``. The betas are the kept
    fractions, as in the authors' code; the paper writes one minus each. It keeps four tensors of state per parameter, twice
    Adam's.

    Args:
        params: the parameters, or parameter groups.
        lr: the learning rate. The authors use 5 to 10 times AdamW's.
        betas: the decay factors (b1, b2, b3).
        eps: the number that keeps the denominator away from zero.
        weight_decay: the weight decay ``lambda``, applied implicitly.

    Raises:
        ValueError: for a value out of range. When a step begins, for a sparse gradient.

    Example:
        >>> optimizer = Adan(model.parameters(), lr=5e-3, weight_decay=0.02)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(Adan, parameters="all", lr=5e-3)])

    References:
        Xie et al. 2022, "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", arXiv:2208.06677.
    """

    paper: ClassVar[str] = "Xie et al. 2022, arXiv:2208.06677"
    saves: ClassVar[str] = "steps, according to the paper; keeps two more tensors of state than Adam"
    constraints: ClassVar[str] = "needs dense gradients"
    steps_apart: ClassVar[bool] = True

    @declared
    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-3,
        betas: Annotated[tuple[float, float, float], Each(Fraction(below=1), length=3)] = (0.98, 0.92, 0.99),
        eps: Eps = 1e-8,
        weight_decay: Rate = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        # the gradient itself, so that the first difference is zero
        (before,) = local([p.grad if p.grad is not None else torch.zeros_like(p)], [p])
        kept = {name: torch.zeros_like(p) for name in _STATE}
        local([kept["previous_grad"]], [p])[0].copy_(before)
        return {"step": 0, **kept}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        lists_ = [grads, *(held(states, name) for name in _STATE)]
        columns = [local(params, params), *(local(found, params) for found in lists_)]
        for t, places in by_step(states):
            for chunk in chunks(*(picked(column, places) for column in columns)):
                self._move(group, t, *chunk)

    def _move(
        self,
        group: dict[str, Any],
        t: int,
        w: list[Tensor],
        g: list[Tensor],
        m: list[Tensor],
        v: list[Tensor],
        n: list[Tensor],
        before: list[Tensor],
    ) -> None:
        """Update a chunk in its step ``t``."""
        (b1, b2, b3), lr = group["betas"], group["lr"]
        # d := g - g'
        d = lists.sub(g, before)
        lists.copy_(before, g)
        # m := b1 m + (1 - b1) g;  v := b2 v + (1 - b2) d
        lists.lerp_(m, g, 1 - b1)
        lists.lerp_(v, d, 1 - b2)
        # n := b3 n + (1 - b3) (g + b2 d)^2
        lists.mul_(d, b2)
        lists.add_(d, g)
        lists.mul_(n, b3)
        lists.addcmul_(n, d, d, 1 - b3)
        # w := w - lr (m^ + b2 v^) / (sqrt(n^) + eps), with the correction of n taken out of the fraction
        correction = (1 - b3**t) ** 0.5
        under = lists.sqrt(n)
        lists.add_(under, group["eps"] * correction)
        lists.addcdiv_(w, m, under, -lr * correction / (1 - b1**t))
        lists.addcdiv_(w, v, under, -lr * correction * b2 / (1 - b2**t))
        # w := w / (1 + lr lambda)
        if group["weight_decay"]:
            lists.div_(w, 1 + lr * group["weight_decay"])
