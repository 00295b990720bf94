"""SET: sparse training that moves the smallest weights to random places (Mocanu et al. 2018)."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Fraction
from lightning_eff._core.search_space import SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.arguments import Dense, Distribution, Sides, Sparsity, Weights
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, no_time, rivals
from lightning_eff.model.sparsity._masks.rewired import Rewired, drawn
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "SET"


class SET(Rewired):
    """Train a sparse network, and move its smallest weights to random places during training.

    Masks start at random, with a fraction ``sparsity`` of the weights at zero. Every ``interval`` optimizer steps, each
    weight matrix drops the fraction ``fraction`` of its kept elements with the smallest magnitude, and as many others grow at
    random places. This needs no gradient of the dense matrix. New elements start at zero, so growth does not change the
    function; in the paper they start at random values.

    Use it where ``RigL`` applies. **It saves no time**, and has the limits, names and costs of ``RigL``. It logs
    ``sparsity``, ``kept`` (elements), ``moved`` (elements that the last change dropped) and ``changes``.

    Args:
        sparsity: the fraction of the masked weights that is zero. 0 is plain training.
        distribution: how zeros are distributed, "erk" or "uniform", see ``RigL``.
        interval: the number of optimizer steps between two changes, counted for each optimizer. The paper changes masks after
            each epoch.
        fraction: the fraction of the kept elements that moves. 0.3 is the paper's. Also accepted as ``zeta``.
        until: the fraction of the budget after which masks stay. 1 is the paper's.
        block: rows and columns of the blocks that are masked together, see ``RigL``.
        names: the weights to mask, see ``RigL``.
        dense: the weights to leave alone, see ``RigL``.

    Raises:
        ValueError: as ``RigL``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SET(0.8, dense=["head"])])

    References: Mocanu et al. 2018, "Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity
        inspired by Network Science", Nature Communications 9, 2383.
    """

    paper = "Mocanu et al. 2018, Nature Communications 9, 2383"
    control = Control("a fixed random mask of the same size", fixed)
    search_space = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, no_time)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}

    def __init__(
        self,
        sparsity: Sparsity = 0.8,
        *,
        distribution: Distribution = "erk",
        interval: Annotated[int, Count()] = 100,
        fraction: Annotated[float, Fraction(above=0), Alias("zeta")] = 0.3,
        until: Annotated[float, Fraction(above=0)] = 1.0,
        block: Sides = (1, 1),
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.interval, self.fraction, self.until = interval, fraction, until
        self._take(sparsity=sparsity, distribution=distribution, names=names, dense=dense, block=block)

    @override
    def share(self, u: float) -> float:
        return self.fraction

    @override
    def growth(self, session: Session, name: str, step: int) -> Tensor | None:
        return drawn(session, WHO, name, step, self.parameter(name))
