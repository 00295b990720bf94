"""RigL: sparse training that drops weights by magnitude and grows them by gradient (Evci et al. 2019)."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Fraction
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.arguments import Dense, Distribution, Sides, Sparsity, Weights
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, agreed, no_time, rivals
from lightning_eff.model.sparsity._masks.rewired import Rewired, drawn
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "RigL"
Grow = Literal["gradient", "random"]


def cosine_fraction(u: float, *, fraction: float, until: float) -> float:
    """``alpha / 2 (1 + cos(pi t / T_end))``.

    Args:
        u: ``t``, the used fraction of the budget.
        fraction: ``alpha``.
        until: ``T_end``, as a fraction of the budget.
    """
    # f_decay(t; α, T_end) = α/2 (1 + cos(tπ / T_end))
    return fraction / 2 * (1.0 + math.cos(math.pi * min(u / until, 1.0)))


class RigL(Rewired):
    """Train a sparse network, and search for the best connections during training.

    Masks start at random, with a fraction ``sparsity`` of the weights at zero. Every ``interval`` optimizer steps, each
    weight matrix drops the fraction ``fraction / 2 (1 + cos(pi u / until))`` of its kept elements with the smallest
    magnitude, where ``u`` is the used fraction of the budget. As many other elements grow: those with the largest gradient of
    the dense matrix, summed over micro-batches and ranks. They start at zero, so growth does not change the function, and
    with momenta of zero. Under Adam, whose step count continues, the first step of such an element is about three times the
    learning rate. The step in which masks change is taken as usual; the paper skips it. Masks are the same on all ranks, and
    resume exactly. A module that steps several optimizers itself, such as a GAN, changes the masks of each optimizer's
    weights by that optimizer's steps and gradients. Clip with ``self.clip_gradients`` there, since other functions see the
    dense gradients of such a step.

    Use it to get a sparse network, for storage or for hardware that profits from zeros, in a single training. **It saves no
    time**: weights are masked in dense products, which cost the same as before. SViTE's vision transformers had 49 % fewer
    operations and ran 4.4 % faster. Masked elements are exact zeros in every checkpoint, which is the plain module's.

    SViTE (Chen et al. 2021) is this method on vision transformers, with an ``interval`` of some thousand steps and
    ``fraction=0.5``; ``block=(4, 4)`` masks whole blocks by the sums of their magnitudes.

    It masks trainable weights of linear layers, convolutions and experts. It masks biases, norms, embeddings and weights tied
    to an embedding only if ``names`` means them. An untied head is masked. The paper's uniform distribution leaves the first
    layer
    dense: name it in ``dense``. It logs ``sparsity``, ``kept`` (elements), ``moved`` (elements that the last change dropped)
    and ``changes``.

    Args:
        sparsity: the fraction of the masked weights that is zero. 0 is plain training.
        distribution: how zeros are distributed. "erk" (Erdős-Rényi-Kernel) is a larger fraction of large matrices, "uniform"
            the same fraction of each.
        interval: the number of optimizer steps between two changes. 100 is the paper's. Also accepted as ``delta``.
        fraction: the fraction of the kept elements that moves at first. 0.3 is the paper's. Also accepted as ``alpha``.
        until: the fraction of the budget after which masks stay. 0.75 is the paper's.
        grow: the rule of growth. "gradient" is RigL's, "random" is that of ``SET``.
        block: rows and columns of the blocks that are masked together. (1, 1) masks single elements.
        names: dotted paths of the weights to mask or of modules that hold them, their last parts, or patterns, such as
            ``["layers.*.mlp.*"]``. None takes all, ``[]`` is plain training.
        dense: patterns of weights to leave alone.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask, a name matches nothing, a weight does not
            consist of whole blocks, or the optimizer keeps moments of sums of weights (SOAP, Shampoo).

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RigL(0.8, dense=["head"])])

    References:
        Evci et al. 2019, "Rigging the Lottery: Making All Tickets Winners", arXiv:1911.11134.
        Chen et al. 2021, "Chasing Sparsity in Vision Transformers: An End-to-End Exploration", arXiv:2106.04533 (SViTE).
    """

    paper = "Evci et al. 2019, arXiv:1911.11134"
    control = Control("a fixed random mask of the same size", fixed)
    search_space = SearchSpace({"sparsity": Uniform(0.5, 0.9), "grow": Choice(("gradient", "random"))}, no_time)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}

    def __init__(
        self,
        sparsity: Sparsity = 0.8,
        *,
        distribution: Distribution = "erk",
        interval: Annotated[int, Count(), Alias("delta")] = 100,
        fraction: Annotated[float, Fraction(above=0), Alias("alpha")] = 0.3,
        until: Annotated[float, Fraction(above=0)] = 0.75,
        grow: Grow = "gradient",
        block: Sides = (1, 1),
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.interval, self.fraction, self.until = interval, fraction, until
        self.grow: Grow = grow
        self._take(sparsity=sparsity, distribution=distribution, names=names, dense=dense, block=block)

    @override
    def share(self, u: float) -> float:
        return cosine_fraction(u, fraction=self.fraction, until=self.until)

    @override
    def growth(self, session: Session, name: str, step: int) -> Tensor | None:
        g = self.parameter(name).grad
        if g is None:
            return None
        if self.grow == "random":
            return drawn(session, WHO, name, step, g)
        return agreed(session, g.detach().abs().float())
