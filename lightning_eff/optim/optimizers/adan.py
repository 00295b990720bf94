"""Adan: Adam with Nesterov's momentum, written in differences of gradients (Xie et al. 2022, arXiv:2208.06677)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import FirstOrder, check, count, held


class Adan(FirstOrder):
    """Momentum of gradients and of their differences, divided by the root of the mean square of both.

    For a parameter ``w`` with gradients ``g`` and, of the step before, ``g'`` (itself, at the first)::

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) (g - g')
        n = b3 n + (1 - b3) (g + b2 (g - g'))^2
        w = (w - lr (m^ + b2 v^) / (sqrt(n^) + eps)) / (1 + lr lambda)

    with ``^`` for division by ``1 - b^t``. Where gradients do not change, a step is ``-lr sign(g)``. Its betas are what is
    kept, as in the authors' code; the paper writes one minus each. Four tensors of state, twice Adam's.

    Args:
        params: parameters or groups.
        lr: the rate, >= 0. Its authors take 5 to 10 times AdamW's.
        betas: (b1, b2, b3), each in [0, 1).
        eps: > 0 keeps the denominator away from zero.
        weight_decay: ``lambda`` >= 0, taken implicitly.

    Raises:
        ValueError: for other values; as a step begins, for a sparse gradient.
    """

    paper: ClassVar[str] = "Xie et al. 2022, arXiv:2208.06677"
    saves: ClassVar[str] = "steps, by the paper's claim; costs two more states than Adam"
    constraints: ClassVar[str] = "any parameters with dense gradients"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check("Adan", betas=betas, num_betas=3, lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        # the gradient itself, so that the first difference is zero
        before = p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq")}
        return {"step": 0, **zeros, "previous_grad": before}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        (b1, b2, b3), lr, steps = group["betas"], group["lr"], count(states)
        m, v, n = (held(states, name) for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq"))
        before = held(states, "previous_grad")
        # d := g - g'
        d = lists.sub(grads, before)
        # m := b1 m + (1 - b1) g;  v := b2 v + (1 - b2) d
        lists.lerp_(m, grads, 1 - b1)
        lists.lerp_(v, d, 1 - b2)
        # n := b3 n + (1 - b3) (g + b2 d)^2
        looked = lists.add(grads, d, alpha=b2)
        lists.mul_(n, b3)
        lists.addcmul_(n, looked, looked, 1 - b3)
        # w := w - lr (m^ + b2 v^) / (sqrt(n^) + eps)
        under = lists.sqrt(n)
        lists.div_(under, [(1 - b3**t) ** 0.5 for t in steps])
        lists.add_(under, group["eps"])
        lists.addcdiv_(params, m, under, [-lr / (1 - b1**t) for t in steps])
        lists.addcdiv_(params, v, under, [-lr * b2 / (1 - b2**t) for t in steps])
        # w := w / (1 + lr lambda)
        if group["weight_decay"]:
            lists.div_(params, 1 + lr * group["weight_decay"])
        for kept, grad in zip(before, grads, strict=True):
            kept.copy_(grad)
