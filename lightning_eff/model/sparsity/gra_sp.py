"""GraSP: prune before the first step what the gradient's norm can do without (Wang et al. 2020)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.search_space import SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model._derivatives.passes import watched
from lightning_eff.model.sparsity._masks.masked import agreed, no_time, rivals
from lightning_eff.model.sparsity._masks.scored import ZEROS, Scored
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "GraSP"


def gradient_flow(weight: Tensor, hessian_gradient: Tensor) -> Tensor:
    """``-theta Hg``: half of how ``|g|^2`` changes, to first order, as each number of a weight is removed.

    Args:
        weight: ``theta``.
        hessian_gradient: ``H g``, of the same shape.
    """
    # S(−θ) = −θ ⊙ H g
    return -weight * hessian_gradient


class _Tempered(TorchFunctionMode):
    """Logits of cross-entropies are divided by a temperature; how often is counted."""

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
    """Before the first step, set the ``sparsity`` of all weights to zero without which the gradient stays largest.

    The score of a weight is ``-theta Hg``, half of how the squared norm of the gradient ``g`` changes as it is removed, with
    the loss's Hessian ``H``; those with the highest are pruned. Logits are divided by ``temperature`` meanwhile, so that the
    network's confidence at its first weights does not decide. The step is differentiated twice, on ``batches`` batches of each
    rank, and holds both graphs: attention is computed by operations that can be.

    **It saves no time** in training, as ``RigL``: masked products cost what dense ones do. And what it chooses is how many
    weights of each layer are kept: with masks shuffled within layers, networks train as well (Frankle et al. 2020).

    The weights are found as by ``RigL``. One that has no gradient on these batches, such as that of an expert to which no token
    went, is an error.

    Logged: ``sparsity`` and ``kept`` (numbers).

    Args:
        sparsity: the share of the masked weights that is zero, in [0, 1). 0 is plain training.
        batches: how many are scored on, on each rank, >= 1.
        temperature: what logits are divided by, in ``cross_entropy`` and ``binary_cross_entropy_with_logits``, above 0. 200 is
            the paper's; 1 leaves the loss as it is.
        names: see ``RigL``.
        dense: see ``RigL``.

    Raises:
        ValueError: for other values; at setup, if there is nothing to mask, or a name means nothing; at the first batch, which
            leaves weights as they were, if a weight has no gradient, the loss cannot be differentiated twice, or it calls no
            cross-entropy with a ``temperature`` other than 1.

    Sources:
        Wang et al. 2020, arXiv:2002.07376; Frankle et al. 2020, arXiv:2009.08576.
    """

    saves: ClassVar[str] = "no time: a sparse network for one training, on hardware that computes zeros as any number"
    paper: ClassVar[str] = "Wang et al. 2020, arXiv:2002.07376"
    constraints: ClassVar[str] = "losses that have second derivatives"
    survey: ClassVar[Survey | None] = Survey("GraSP", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, no_time)
    control: ClassVar[Control] = Control("a random mask of the same size, which stays", fixed)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **ZEROS}

    def __init__(
        self,
        sparsity: float = 0.8,
        *,
        batches: int = 1,
        temperature: float = 200.0,
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        self._check_batches(batches)
        if not 0.0 < temperature < float("inf"):
            raise ValueError(
                f"{WHO}({temperature=}): expected a number above 0, by which logits are divided. 200 is the paper's."
            )
        self.temperature = temperature
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
                    " cross_entropy nor binary_cross_entropy_with_logits, whose logits it could divide; expected one. Set"
                    " temperature=1. No weight has changed."
                )
            products = {name: torch.zeros_like(one) for name, one in g.items()}

            def multiply() -> None:
                for batch in data:
                    self._multiply(session, batch, batch_idx, g, products, 1 / len(data))

            on_all_ranks(session, multiply)
        return {
            name: -gradient_flow(self.parameter(name).detach(), agreed(session, hg)) for name, hg in products.items()
        }

    def _multiply(
        self,
        session: Session,
        batch: Any,
        batch_idx: int,
        g: Mapping[str, Tensor],
        products: Mapping[str, Tensor],
        part: float,
    ) -> None:
        """Add ``part`` of ``H g`` on a batch to ``products``."""
        loss = self.loss(session, batch, batch_idx, 2)
        assert loss is not None, "it was there before"
        parameters = [self.parameter(name) for name in g]
        reason = ""
        with watched(loss) as (whole, constant):
            try:
                first = torch.autograd.grad(whole, parameters, create_graph=True, allow_unused=True)
                dot: Any = sum((f * one).sum() for f, one in zip(first, g.values(), strict=True) if f is not None)
                second = torch.autograd.grad(dot, parameters, allow_unused=True)
            except RuntimeError as e:
                second, reason = (), str(e).strip().partition("\n")[0]
        if constant:
            reason = f"the backward pass of {', '.join(constant)} has no derivative"
        if reason:
            raise ValueError(
                f"{WHO}: the loss of {type(session.module).__name__} cannot be differentiated twice ({reason}); expected one of"
                " operations that can. Let the module use other operations, or use SNIP, which differentiates once. No weight"
                " has changed."
            )
        for product, hg in zip(products.values(), second, strict=True):
            if hg is not None:
                product += part * hg
