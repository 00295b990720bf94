"""RigL: sparse training whose weights are dropped by magnitude and grown by gradient (Evci et al. 2019)."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.allotting import Distribution
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, agreed, no_time, rivals
from lightning_eff.model.sparsity._masks.rewired import Rewired, drawn
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "RigL"
Grow = Literal["gradient", "random"]


def cosine_fraction(u: float, *, fraction: float, until: float) -> float:
    """``alpha / 2 (1 + cos(pi t / T_end))``.

    Args:
        u: ``t``, the used share of the budget.
        fraction: ``alpha``.
        until: ``T_end``, as a share of the budget.
    """
    # f_decay(t; α, T_end) = α/2 (1 + cos(tπ / T_end))
    return fraction / 2 * (1.0 + math.cos(math.pi * min(u / until, 1.0)))


class RigL(Rewired):
    """Train a network of which ``sparsity`` of the weights is zero at any time, and search for the right ones meanwhile.

    Masks begin at random. Every ``interval`` optimizer steps, of each weight matrix, the share
    ``fraction / 2 (1 + cos(pi u / until))`` of its kept numbers that is smallest in magnitude is dropped, and as many others
    grow: those with the largest gradient of the dense matrix, which is summed over micro-batches and ranks. They begin at
    zero, so that the function does not change by growth, and with momenta of zero. With Adam, whose count of steps goes on,
    the first step of such a weight is about three times the rate. The step at whose end masks change is taken as any other;
    the paper leaves it out. Masks are the same on all ranks, and after a resume in mid-schedule.

    **It saves no time.** Weights are masked within dense products, which cost on CPUs and GPUs what they did: SViTE's vision
    transformers had 49 % fewer operations and ran 4.4 % faster. What it gives is a sparse network, for storage or for hardware
    that profits, at the cost of one dense training rather than several. Masked numbers are exact zeros in every checkpoint,
    which is the plain module's.

    SViTE (Chen et al. 2021) is this on vision transformers, with ``interval`` of some thousand steps and ``fraction=0.5``;
    ``block=(4, 4)`` masks whole blocks by the sums of their magnitudes.

    The weights are those of linear maps and convolutions that train, experts' too; never biases, norms, embeddings, and what is
    tied to one, unless ``names`` asks for them. A head that is not tied is one. The paper's uniform distribution leaves the
    first layer dense: name it in ``dense``.

    Logged: ``sparsity``, ``kept`` (numbers), ``moved`` (numbers that the last change dropped), ``changes``.

    Args:
        sparsity: the share of the masked weights that is zero, in [0, 1). 0 is plain training.
        distribution: "erk", by which large matrices have a larger share of zeros (Erdős-Rényi-Kernel); "uniform", all the same.
        interval: optimizer steps between two changes, >= 1. 100 is the paper's.
        fraction: alpha, the share that moves at first, in (0, 1]. 0.3 is the paper's.
        until: the share of the budget from which on masks stay, in (0, 1]. 0.75 is the paper's.
        grow: "gradient", or "random", which is ``SET``'s rule on this schedule.
        block: rows and columns of the blocks that are masked as one. (1, 1) masks single numbers.
        names: dotted paths of weights or of modules that hold them, their last parts or patterns; None for all.
        dense: patterns of weights among these that are left alone.

    Raises:
        ValueError: for other values; at setup, if there is nothing to mask, a name means nothing, a weight is not made of whole
            blocks, or the optimizer keeps moments of sums of weights (SOAP, Shampoo).

    Sources:
        Evci et al. 2019, arXiv:1911.11134; Chen et al. 2021 (SViTE), arXiv:2106.04533.
    """

    saves: ClassVar[str] = "no time: a sparse network for one training, on hardware that computes zeros as any number"
    paper: ClassVar[str] = "Evci et al. 2019, arXiv:1911.11134"
    constraints: ClassVar[str] = "optimizers that keep moments weight by weight"
    survey: ClassVar[Survey | None] = Survey("RigL", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"sparsity": Uniform(0.5, 0.9), "grow": Choice(("gradient", "random"))}, no_time
    )
    control: ClassVar[Control] = Control("a random mask of the same size, which stays", fixed)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}

    def __init__(
        self,
        sparsity: float = 0.8,
        *,
        distribution: Distribution = "erk",
        interval: int = 100,
        fraction: float = 0.3,
        until: float = 0.75,
        grow: Grow = "gradient",
        block: Sequence[int] = (1, 1),
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        self._check_schedule(interval, fraction, until)
        if grow not in ("gradient", "random"):
            raise ValueError(f"{WHO}({grow=}): expected 'gradient' or 'random'.")
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
