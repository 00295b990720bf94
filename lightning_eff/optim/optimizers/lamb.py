"""LAMB: Adam's direction, with steps proportional to the norm of each layer's weights (You et al. 2019)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._optim.chunks import chunks, stretches
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Betas, Eps, FirstOrder, Rate, by_step, held, norms, picked


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
    steps_apart: ClassVar[bool] = True

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
        columns = [params, grads, held(states, "exp_avg"), held(states, "exp_avg_sq")]
        for t, places in by_step(states):
            w, g, m, v = (picked(column, places) for column in columns)
            for layers in (True, False):
                own = [i for i, p in enumerate(w) if (group["vectors"] or p.ndim > 1) == layers]
                rows = [picked(column, own) for column in (w, g, m, v)]
                for part in stretches(rows[0]):
                    self._move(group, t, layers, *(row[part] for row in rows))

    def _move(
        self,
        group: dict[str, Any],
        t: int,
        layers: bool,
        w: list[Tensor],
        g: list[Tensor],
        m: list[Tensor],
        v: list[Tensor],
    ) -> None:
        """Update several tensors that fill a chunk, or a larger one, in their step ``t``."""
        (b1, b2), lr = group["betas"], group["lr"]
        correction = (1 - b2**t) ** 0.5
        factor = correction / (1 - b1**t)  # of m / (sqrt(v) + eps correction), which is m^ / (sqrt(v^) + eps)
        ws, us = list[list[Tensor]](), list[list[Tensor]]()
        for w_, g_, m_, v_ in chunks(w, g, m, v):
            # m := b1 m + (1 - b1) g;  v := b2 v + (1 - b2) g^2
            lists.lerp_(m_, g_, 1 - b1)
            lists.mul_(v_, b2)
            lists.addcmul_(v_, g_, g_, 1 - b2)
            # u := m^ / (sqrt(v^) + eps) + lambda w, over the factor
            u = list(lists.sqrt(v_))
            lists.add_(u, group["eps"] * correction)
            lists.reciprocal_(u)
            lists.mul_(u, m_)
            if layers and group["weight_decay"]:
                lists.add_(u, w_, alpha=group["weight_decay"] / factor)
            if not layers:
                lists.add_(w_, u, alpha=-lr * factor)
                continue
            ws.append(w_)
            us.append(u)
        if not layers:
            return
        # w := w - lr |w| / |u| u, from which the factor of u drops out
        of_w, of_u = norms(ws), norms(us)
        ratios = torch.where((of_w > 0) & (of_u > 0), of_w / of_u, factor)
        for w_, u in zip(ws, us, strict=True):
            lists.addcmul_(w_, u, list(ratios.unbind()), -lr)
