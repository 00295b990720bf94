"""SET: sparse training whose smallest weights move to random places (Mocanu et al. 2018)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.allotting import Distribution
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, no_time, rivals
from lightning_eff.model.sparsity._masks.rewired import Rewired, drawn
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "SET"


class SET(Rewired):
    """Train a network of which ``sparsity`` of the weights is zero at any time, whose smallest weights move at random.

    Masks begin at random. Every ``interval`` optimizer steps, of each weight matrix, the share ``fraction`` of its kept numbers
    that is smallest in magnitude is dropped, and as many others grow at random places: no gradient of the dense matrix is
    needed for it. They begin at zero, so that the function does not change by growth; the paper draws them.

    **It saves no time**, as ``RigL``, whose constraints, names and costs are these too.

    Logged: ``sparsity``, ``kept`` (numbers), ``moved`` (numbers that the last change dropped), ``changes``.

    Args:
        sparsity: the share of the masked weights that is zero, in [0, 1). 0 is plain training.
        distribution: "erk" or "uniform", see ``RigL``.
        interval: optimizer steps between two changes, >= 1; the paper changes masks after each epoch.
        fraction: zeta, the share that moves, in (0, 1]. 0.3 is the paper's.
        until: the share of the budget from which on masks stay, in (0, 1]. 1 is the paper's.
        block: see ``RigL``.
        names: see ``RigL``.
        dense: see ``RigL``.

    Raises:
        ValueError: as ``RigL``.

    Sources:
        Mocanu et al. 2018, Nature Communications 9, 2383.
    """

    saves: ClassVar[str] = "no time: a sparse network for one training, on hardware that computes zeros as any number"
    paper: ClassVar[str] = "Mocanu et al. 2018, Nature Communications 9, 2383"
    constraints: ClassVar[str] = "optimizers that keep moments weight by weight"
    survey: ClassVar[Survey | None] = Survey("SET", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, no_time)
    control: ClassVar[Control] = Control("a random mask of the same size, which stays", fixed)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}

    def __init__(
        self,
        sparsity: float = 0.8,
        *,
        distribution: Distribution = "erk",
        interval: int = 100,
        fraction: float = 0.3,
        until: float = 1.0,
        block: Sequence[int] = (1, 1),
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        self._check_schedule(interval, fraction, until)
        self.interval, self.fraction, self.until = interval, fraction, until
        self._take(sparsity=sparsity, distribution=distribution, names=names, dense=dense, block=block)

    @override
    def share(self, u: float) -> float:
        return self.fraction

    @override
    def growth(self, session: Session, name: str, step: int) -> Tensor | None:
        return drawn(session, WHO, name, step, self.parameter(name))
