"""ACClip: momentum that is clipped per coordinate by an adaptive threshold (Zhang et al. 2020)."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Number
from lightning_eff._core._optim.chunks import chunks, local
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Betas, FirstOrder, Rate, held


class ACClip(FirstOrder):
    """Clip the momentum of every weight at its own threshold, which follows the size of its gradients.

    For a parameter ``w`` with gradient ``g``, at learning rate ``lr`` and weight decay ``lambda``, for each element::

        m       = b1 m + (1 - b1) g
        tau^a   = b2 tau^a + (1 - b2) |g|^a
        w       = w - lr (min(tau / (|m| + eps), 1) m + lambda w)

    Gradients of attention models have heavy tails: single samples make a few elements very large. A step moves no weight by
    more than ``lr tau``, so such outliers do little harm. Unlike Adam's step, it is proportional to the gradient: if all
    gradients double, so does the step, and the learning rate is on SGD's scale. It keeps two tensors of state per parameter,
    as Adam does.

    Use it to study clipping on attention models. The authors train BERT with it and reach a lower loss than Adam after as
    many steps. Neither moving average is corrected for its start at zero, as in the paper: the first steps are short, since
    ``tau`` grows over ``1 / (1 - b2)`` steps.

    Args:
        params: the parameters, or parameter groups.
        lr: the learning rate.
        betas: the decay factors (b1, b2) of the momentum and of the threshold.
        eps: the number that keeps the denominator away from zero.
        alpha: the moment ``a`` of the gradients from which the threshold follows. The authors use 1 and 2.
        weight_decay: the weight decay ``lambda``, decoupled and scaled by the learning rate.

    Raises:
        ValueError: for a value out of range. When a step begins, for a sparse gradient.

    Example:
        >>> optimizer = ACClip(model.parameters(), lr=0.01)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(ACClip, parameters="all", lr=0.01)])

    References:
        Zhang et al. 2020, "Why are Adaptive Methods Good for Attention Models?", arXiv:1912.03194, algorithm 2.
    """

    paper: ClassVar[str] = "Zhang et al. 2020, arXiv:1912.03194"
    saves: ClassVar[str] = "steps on attention models, according to the paper; keeps as much state as Adam"
    constraints: ClassVar[str] = "needs dense gradients, and a learning rate on SGD's scale"
    steps_apart: ClassVar[bool] = True

    @declared
    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-2,
        betas: Betas = (0.9, 0.99),
        eps: Annotated[float, Number(above=0)] = 1e-5,
        alpha: Annotated[float, Number(above=0)] = 1.0,
        weight_decay: Rate = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "eps": eps, "alpha": alpha, "weight_decay": weight_decay}
        )

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(p), "exp_avg_abs": torch.zeros_like(p)}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        columns = (params, grads, held(states, "exp_avg"), held(states, "exp_avg_abs"))
        (b1, b2), alpha, lr = group["betas"], group["alpha"], group["lr"]
        for w, g, m, v in chunks(*(local(column, params) for column in columns)):
            # m := b1 m + (1 - b1) g;  v = tau^a := b2 v + (1 - b2) |g|^a
            lists.lerp_(m, g, 1 - b1)
            size = lists.abs(g)
            if alpha != 1:
                lists.pow_(size, alpha)
            lists.lerp_(v, size, 1 - b2)
            del size
            # q := min(tau / (|m| + eps), 1)
            under = lists.abs(m)
            lists.add_(under, group["eps"])
            q = lists.div(v, under) if alpha == 1 else lists.pow(v, 1 / alpha)
            if alpha != 1:
                lists.div_(q, under)
            lists.clamp_max_(q, 1.0)
            # w := (1 - lr lambda) w - lr q m
            if group["weight_decay"]:
                lists.mul_(w, 1 - lr * group["weight_decay"])
            lists.addcmul_(w, q, m, -lr)
