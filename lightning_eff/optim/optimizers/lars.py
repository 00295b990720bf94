"""LARS: a learning rate per layer, proportional to the ratio of weight norm and gradient norm (You et al. 2017)."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._optim.chunks import chunks, stretches
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import FirstOrder, Rate, held, norms, picked


class LARS(FirstOrder):
    """Momentum SGD for large batches, with steps proportional to the norm of each layer's weights.

    For a layer's weights ``w`` with gradient ``g``, at learning rate ``lr`` and weight decay ``beta``::

        local = eta |w| / (|g| + beta |w|)       # 1 where a norm is zero
        v = momentum v + lr local (g + beta w)
        w = w - v

    The momentum includes the learning rate, as in the paper: when the learning rate falls, earlier steps keep theirs. Use it
    for batches of thousands of samples. Later work finds that Nesterov momentum is as good if it is tuned equally well (Nado
    et al. 2021, arXiv:2102.06356).

    Args:
        params: the parameters, or parameter groups.
        lr: the global learning rate, ``gamma`` in the paper.
        momentum: the momentum factor.
        weight_decay: the weight decay ``beta``.
        trust: the trust coefficient ``eta``.
        vectors: whether biases, scales and other one-dimensional tensors also have local learning rates and weight decay. By
            default they get plain momentum SGD without decay, as is usual for large batches.

    Raises:
        ValueError: for a value out of range. When a step begins, for a sparse gradient.

    Example:
        >>> optimizer = LARS(model.parameters(), lr=1.0, weight_decay=1e-4)

    References:
        You et al. 2017, "Large Batch Training of Convolutional Networks", arXiv:1708.03888.
    """

    paper: ClassVar[str] = "You et al. 2017, arXiv:1708.03888"
    saves: ClassVar[str] = "steps with very large batches; tuned SGD with momentum does as well"
    constraints: ClassVar[str] = "meant for batches of thousands of samples"
    steps_apart: ClassVar[bool] = True

    @declared
    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1.0,
        momentum: Annotated[float, Fraction(below=1)] = 0.9,
        weight_decay: Rate = 1e-4,
        *,
        trust: Rate = 1e-3,
        vectors: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "vectors": vectors}
        super().__init__(params, defaults)

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p)}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        columns = [params, grads, held(states, "momentum_buffer")]
        for layers in (True, False):
            own = [i for i, p in enumerate(params) if (group["vectors"] or p.ndim > 1) == layers]
            rows = [picked(column, own) for column in columns]
            for part in stretches(rows[0]):
                self._move(group, layers, *(row[part] for row in rows))

    def _move(self, group: dict[str, Any], layers: bool, w: list[Tensor], g: list[Tensor], v: list[Tensor]) -> None:
        """Update several tensors that fill a chunk, or a larger one."""
        lr, beta, eta = group["lr"], group["weight_decay"], group["trust"]
        parts, rates = list(chunks(w, g, v)), list[Tensor]()
        if layers:
            # local := eta |w| / (|g| + beta |w|)
            of_w, of_g = norms([part[0] for part in parts]), norms([part[1] for part in parts])
            local = torch.where((of_w > 0) & (of_g > 0), eta * of_w / (of_g + beta * of_w), 1.0)
            rates = list((lr * local).unbind())
        for w_, g_, v_ in parts:
            # v := momentum v + lr local (g + beta w)
            lists.mul_(v_, group["momentum"])
            if layers:
                lists.addcmul_(v_, g_, rates)
                if beta:
                    lists.addcmul_(v_, w_, rates, beta)
            else:
                lists.add_(v_, g_, alpha=lr)
            # w := w - v
            lists.sub_(w_, v_)
