"""LARS: a rate for each layer, in proportion to its weights' norm over its gradient's (You et al. 2017, arXiv:1708.03888)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import FirstOrder, check, held


class LARS(FirstOrder):
    """Momentum SGD for large batches, whose steps are a given part of each layer's weights.

    For a layer's weights ``w`` with gradient ``g``, at rate ``lr`` and decay ``beta``::

        local = eta |w| / (|g| + beta |w|)       # 1 where a norm is zero
        v = momentum v + lr local (g + beta w)
        w = w - v

    The momentum holds rates, as in the paper: where the rate falls, steps made before keep theirs. Later work finds plain
    Nesterov momentum as good, where it is tuned as long (Nado et al. 2021, arXiv:2102.06356).

    Args:
        params: parameters or groups.
        lr: the global rate ``gamma``, >= 0.
        momentum: in [0, 1).
        weight_decay: ``beta`` >= 0.
        trust: ``eta`` >= 0.
        vectors: whether biases, scales and other tensors of one dimension have local rates and decay too. Left out, they
            are plain momentum SGD without decay, as large-batch training has them.

    Raises:
        ValueError: for other values; as a step begins, for a sparse gradient.
    """

    paper: ClassVar[str] = "You et al. 2017, arXiv:1708.03888"
    saves: ClassVar[str] = "steps of very large batches; tuned SGD with momentum does as well"
    constraints: ClassVar[str] = "batches of thousands"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        *,
        trust: float = 1e-3,
        vectors: bool = False,
    ) -> None:
        check("LARS", lr=lr, weight_decay=weight_decay, trust=trust)
        if not 0 <= momentum < 1:
            raise ValueError(f"LARS({momentum=}): expected a number in [0, 1).")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "vectors": vectors}
        super().__init__(params, defaults)

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p)}

    @override
    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        lr, beta, eta, v = group["lr"], group["weight_decay"], group["trust"], held(states, "momentum_buffer")
        layers = [group["vectors"] or p.ndim > 1 for p in params]
        of_weights, of_gradients = lists.norm(params), lists.norm(grads)
        # local := eta |w| / (|g| + beta |w|)
        local = [
            torch.where((a > 0) & (b > 0), eta * a / (b + beta * a), torch.ones_like(a))
            if layer
            else torch.ones_like(a)
            for a, b, layer in zip(of_weights, of_gradients, layers, strict=True)
        ]
        # v := momentum v + lr local (g + beta w)
        decayed = [
            g.add(p, alpha=beta) if beta and layer else g for g, p, layer in zip(grads, params, layers, strict=True)
        ]
        lists.mul_(v, group["momentum"])
        lists.add_(v, [g * (lr * rate) for g, rate in zip(decayed, local, strict=True)])
        # w := w - v
        lists.add_(params, v, alpha=-1)
