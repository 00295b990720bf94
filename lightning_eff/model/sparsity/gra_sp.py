"""GraSP: prune before the first step, and preserve the gradient's norm (Wang et al. 2020)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._architecture.updates import backward_of
from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.session import Session
from lightning_eff.model._derivatives.passes import watched
from lightning_eff.model.sparsity._masks.arguments import Dense, Sparsity, Weights
from lightning_eff.model.sparsity._masks.masked import agreed, rivals
from lightning_eff.model.sparsity._masks.scored import ZEROS, Scored

WHO = "GraSP"


def gradient_flow(weight: Tensor, hessian_gradient: Tensor) -> Tensor:
    """``-theta Hg``: half of the first-order change of ``|g|^2`` when an element of a weight is removed.

    Args:
        weight: ``theta``.
        hessian_gradient: ``H g``, of the same shape.
    """
    # S(−θ) = −θ ⊙ H g
    return -weight * hessian_gradient


class _Tempered(TorchFunctionMode):
    """Divides logits of cross-entropies by a temperature, and counts the calls."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature, self.calls = temperature, 0

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (F.cross_entropy, F.binary_cross_entropy_with_logits):
            self.calls += 1
            if args:
                args = (args[0] / self.temperature, *args[1:])
            else:
                given["input"] = given["input"] / self.temperature
        return func(*args, **given)


class GraSP(Scored):
    """Set weights to zero before the first step so that the gradient stays as large as possible.

    The score of a weight is ``-theta Hg``: half of the change of the squared norm of the gradient ``g`` when the weight is
    removed, with the loss's Hessian ``H``. The weights with the highest scores are pruned. Meanwhile, logits are divided by
    ``temperature``, so that the network's confidence at its initial weights has no influence. The step is differentiated
    twice, on ``batches`` batches of each rank, and holds both graphs; attention uses operations with second derivatives. In a
    module that steps several optimizers itself, such as a GAN, each optimizer's weights are scored and compared by the loss
    of its own steps.

    Use it to get a sparse network in one training. **It saves no time** in training, as ``RigL``: masked products cost the
    same as dense ones. Its benefit is the choice of how many weights each layer keeps: with masks shuffled within layers,
    networks train as well (Frankle et al. 2020). It finds weights as ``RigL`` does. It logs ``sparsity`` and ``kept``
    (elements).

    Args:
        sparsity: the fraction of the masked weights that is zero. 0 is plain training.
        batches: the number of batches for the scores, on each rank.
        temperature: the divisor of logits in ``cross_entropy`` and ``binary_cross_entropy_with_logits``. 200 is the paper's,
            1 leaves the loss unchanged.
        names: the weights to mask, see ``RigL``.
        dense: the weights to leave alone, see ``RigL``.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask or a name matches nothing. On the first
            batch, before any weight has changed, if a weight has no gradient (such as an expert that gets no token), the loss
            has no second derivatives, or it has no cross-entropy and ``temperature`` is not 1.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[GraSP(0.8, batches=4)])

    References:
        Wang et al. 2020, "Picking Winning Tickets Before Training by Preserving Gradient Flow", arXiv:2002.07376.
        Frankle et al. 2020, "Pruning Neural Networks at Initialization: Why are We Missing the Mark?", arXiv:2009.08576.
    """

    paper = "Wang et al. 2020, arXiv:2002.07376"
    constraints = "losses that have second derivatives"
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **ZEROS}

    def __init__(
        self,
        sparsity: Sparsity = 0.8,
        *,
        batches: Annotated[int, Count()] = 1,
        temperature: Annotated[float, Number(above=0)] = 200.0,
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.batches, self.temperature = batches, temperature
        self._take(sparsity=sparsity, names=names, dense=dense)

    @override
    def scores(self, session: Session, data: Sequence[Any], batch_idx: int) -> dict[str, Tensor] | None:
        with _Tempered(self.temperature) as tempered:
            g = self.gradients(session, data, batch_idx)
            if g is None:
                return None
            if self.temperature != 1.0 and not tempered.calls:
                raise ValueError(
                    f"{WHO}(temperature={self.temperature}): training_step of {type(session.module).__name__} calls no"
                    " cross_entropy or binary_cross_entropy_with_logits, so it has no logits to divide. Set temperature=1; no"
                    " weight has changed."
                )
            products = on_all_ranks(session, lambda: self._products(session, data, batch_idx, g))
        return {
            name: -gradient_flow(self.parameter(name).detach(), agreed(session, hg)) for name, hg in products.items()
        }

    def _products(
        self, session: Session, data: Sequence[Any], batch_idx: int, g: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """``H g`` of each weight, the mean over the batches."""
        if not session.module.automatic_optimization:
            return self._of_steps(session, data, batch_idx, g)
        products = {name: torch.zeros_like(one) for name, one in g.items()}
        for batch in data:
            loss = self.loss(session, batch, batch_idx, 2)
            assert loss is not None, "this batch had a loss before"
            parameters = [self.parameter(name) for name in g]
            second: Sequence[Tensor | None] = ()
            with watched(loss) as derived:
                first = torch.autograd.grad(derived.loss, parameters, create_graph=True, allow_unused=True)
                dot: Any = sum((f * one).sum() for f, one in zip(first, g.values(), strict=True) if f is not None)
                second = torch.autograd.grad(dot, parameters, allow_unused=True)
            self._check(session, derived.reason)
            for product, hg in zip(products.values(), second, strict=True):
                if hg is not None:
                    product += (1 / len(data)) * hg
        return products

    def _of_steps(
        self, session: Session, data: Sequence[Any], batch_idx: int, g: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """``H g`` with the loss that each optimizer's step minimises, under manual optimization."""
        plain, reasons = backward_of(session.module), [""]

        def backward(loss: Tensor, gradient: Tensor | None = None, *_: Any, inputs: Any = None, **kwargs: Any) -> None:
            with watched(loss) as derived:
                plain(derived.loss, gradient, retain_graph=True, create_graph=True, inputs=inputs)
            reasons.append(derived.reason)

        def multiply(names: list[str]) -> dict[str, Tensor]:
            first = {name: f for name in names if (f := self.parameter(name).grad) is not None and f.requires_grad}
            if not first:
                return {}
            dot: Any = sum((f * g[name]).sum() for name, f in first.items())
            parameters = [self.parameter(name) for name in names]
            second: Sequence[Tensor | None] = ()
            with watched(dot) as derived:
                second = torch.autograd.grad(derived.loss, parameters, retain_graph=True, allow_unused=True)
            reasons.append(derived.reason)
            return {
                name: torch.zeros_like(g[name]) if hg is None else hg for name, hg in zip(names, second, strict=False)
            }

        products = self.over_steps(session, data, batch_idx, multiply, passes=2, backward=backward)
        self._check(session, max(reasons))
        return products

    def _check(self, session: Session, reason: str) -> None:
        """Raise ``ValueError`` if there is a reason why there are no second derivatives."""
        if reason:
            raise ValueError(
                f"{WHO}: the loss of {type(session.module).__name__} cannot be differentiated twice"
                f" ({reason}). Use other operations in the module, or SNIP, which differentiates once; no weight has"
                " changed."
            )
