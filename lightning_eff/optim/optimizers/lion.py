"""Lion: the sign of interpolated momentum, found by symbolic search (Chen et al. 2023, arXiv:2302.06675)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import FirstOrder, check, held


class Lion(FirstOrder):
    """Every weight moves by exactly the rate, in the direction of the sign of interpolated momentum.

    For a parameter ``w`` with gradient ``g``, at rate ``lr`` and decay ``lambda``::

        c = b1 m + (1 - b1) g
        w = w - lr (sign(c) + lambda w)
        m = b2 m + (1 - b2) g

    One tensor of state, half of Adam's. Since every entry of a step is as large as the rate, its authors take a rate 3 to 10
    times smaller than AdamW's and a decay as many times larger; small batches suit it less. It does not see how large
    gradients are.

    Args:
        params: parameters or groups.
        lr: the rate, >= 0.
        betas: (b1, b2), each in [0, 1).
        weight_decay: ``lambda`` >= 0, decoupled and scaled by the rate.

    Raises:
        ValueError: for other values; as a step begins, for a sparse gradient.
    """

    paper: ClassVar[str] = "Chen et al. 2023, arXiv:2302.06675"
    saves: ClassVar[str] = "half of Adam's state; no time that others could find"
    constraints: ClassVar[str] = "large batches; a rate 3 to 10 times smaller than AdamW's"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check("Lion", betas=betas, num_betas=2, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(p)}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        (b1, b2), lr, m = group["betas"], group["lr"], held(states, "exp_avg")
        if group["weight_decay"]:
            lists.mul_(params, 1 - lr * group["weight_decay"])
        # c := b1 m + (1 - b1) g
        c = lists.lerp(grads, m, b1)
        lists.sign_(c)
        # w := w - lr sign(c)
        lists.add_(params, c, alpha=-lr)
        # m := b2 m + (1 - b2) g
        lists.lerp_(m, grads, 1 - b2)
