"""Lion: the sign of interpolated momentum, discovered by symbolic search (Chen et al. 2023)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._optim.chunks import chunks, local
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Betas, FirstOrder, Rate, held


class Lion(FirstOrder):
    """Move every weight by exactly the learning rate, in the direction of the sign of interpolated momentum.

    For a parameter ``w`` with gradient ``g``, at learning rate ``lr`` and weight decay ``lambda``::

        c = b1 m + (1 - b1) g
        w = w - lr (sign(c) + lambda w)
        m = b2 m + (1 - b2) g

    It keeps one tensor of state per parameter, half of Adam's. Because every entry of a step is as large as the learning
    rate, the authors use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same factor.
    It works better with large batches, and ignores the size of gradients.

    Args:
        params: the parameters, or parameter groups.
        lr: the learning rate.
        betas: the factors (b1, b2).
        weight_decay: the weight decay ``lambda``, decoupled and scaled by the learning rate.

    Raises:
        ValueError: for a value out of range. When a step begins, for a sparse gradient.

    Example:
        >>> optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(Lion, parameters="all", lr=1e-4, weight_decay=0.1)])

    References:
        Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.
    """

    paper: ClassVar[str] = "Chen et al. 2023, arXiv:2302.06675"
    saves: ClassVar[str] = "half of Adam's state; independent measurements found no gain in time"
    constraints: ClassVar[str] = "meant for large batches; needs a learning rate 3 to 10 times smaller than AdamW's"
    steps_apart: ClassVar[bool] = True

    @declared
    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: Rate = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(p)}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        columns = (params, grads, held(states, "exp_avg"))
        (b1, b2), lr = group["betas"], group["lr"]
        for w, g, m in chunks(*(local(column, params) for column in columns)):
            if group["weight_decay"]:
                lists.mul_(w, 1 - lr * group["weight_decay"])
            # c := b1 m + (1 - b1) g
            c = lists.lerp(g, m, b1)
            lists.sign_(c)
            # w := w - lr sign(c)
            lists.add_(w, c, alpha=-lr)
            # m := b2 m + (1 - b2) g
            lists.lerp_(m, g, 1 - b2)
