"""LAMB: Adam's direction, with steps proportional to the norm of each layer's weights (You et al. 2019)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Betas, Eps, FirstOrder, Rate, count, held, ratio_of_norms


class LAMB(FirstOrder):
    """AdamW for large batches, with steps proportional to the norm of each layer's weights.

    For a layer's weights ``w`` with gradient ``g``, at learning rate ``lr`` and weight decay ``lambda``::

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        u = m^ / (sqrt(v^) + eps) + lambda w
        w = w - lr |w| / |u| u                   # |w| / |u| is 1 where a norm is zero

    with ``^`` for division by ``1 - b^t``. Every step of a layer has the length ``lr |w|``. Use it for batches of thousands of
    samples. Later work finds that AdamW is as good if it is tuned equally well (Nado et al. 2021, arXiv:2102.06356). The
    authors' BERT runs clip gradients at 1, which the Trainer's ``gradient_clip_val`` does.

    Args:
        params: the parameters, or parameter groups.
        lr: the learning rate.
        betas: the decay factors (b1, b2).
        eps: the number that keeps the denominator away from zero.
        weight_decay: the weight decay ``lambda``.
        vectors: whether biases, scales and other one-dimensional tensors also have proportional steps and weight decay. By
            default they get plain Adam, as in the authors' runs.

    Raises:
        ValueError: for a value out of range. When a step begins, for a sparse gradient.

    Example:
        >>> optimizer = LAMB(model.parameters(), lr=2e-3)

    References:
        You et al. 2019, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962.
    """

    paper: ClassVar[str] = "You et al. 2019, arXiv:1904.00962"
    saves: ClassVar[str] = "steps with very large batches; tuned AdamW does as well"
    constraints: ClassVar[str] = "meant for batches of thousands of samples"

    @declared
    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: Eps = 1e-6,
        weight_decay: Rate = 0.01,
        *,
        vectors: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "vectors": vectors}
        super().__init__(params, defaults)

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        (b1, b2), lr, steps = group["betas"], group["lr"], count(states)
        m, v = held(states, "exp_avg"), held(states, "exp_avg_sq")
        # m := b1 m + (1 - b1) g;  v := b2 v + (1 - b2) g^2
        lists.lerp_(m, grads, 1 - b1)
        lists.mul_(v, b2)
        lists.addcmul_(v, grads, grads, 1 - b2)
        # u := m^ / (sqrt(v^) + eps) + lambda w
        under = lists.sqrt(v)
        lists.div_(under, [(1 - b2**t) ** 0.5 for t in steps])
        lists.add_(under, group["eps"])
        u = list(lists.div(m, [1 - b1**t for t in steps]))
        lists.div_(u, under)
        layers = [group["vectors"] or p.ndim > 1 for p in params]
        if group["weight_decay"] and any(layers):
            lists.add_(
                [x for x, layer in zip(u, layers, strict=True) if layer],
                [p for p, layer in zip(params, layers, strict=True) if layer],
                alpha=group["weight_decay"],
            )
        # w := w - lr |w| / |u| u
        ratios = [
            ratio if layer else torch.ones_like(ratio)
            for ratio, layer in zip(ratio_of_norms(params, u), layers, strict=True)
        ]
        lists.mul_(u, ratios)
        lists.add_(params, u, alpha=-lr)
