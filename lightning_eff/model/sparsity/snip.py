"""SNIP: prune before the first step by what each weight does to the loss (Lee et al. 2018)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.masked import no_time, rivals
from lightning_eff.model.sparsity._masks.scored import ZEROS, Scored
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "SNIP"


def connection_sensitivity(weight: Tensor, gradient: Tensor) -> Tensor:
    """``|dL / dc|`` at ``c = 1`` of the loss of ``c * theta``, for each number of a weight.

    Args:
        weight: ``theta``.
        gradient: ``dL / d theta``, of the same shape.
    """
    # |∂L(c ⊙ θ)/∂c|_{c=1} = |g ⊙ θ|
    return (gradient * weight).abs()


class SNIP(Scored):
    """Before the first step, set the ``sparsity`` of all weights to zero that matters least to the loss; they stay zero.

    The score of a weight is ``|g theta|``, by how much the loss changes with a factor before it, from the mean gradient over
    ``batches`` training batches of each rank. The largest scores of all weights together are kept, so that some layers keep
    more than others.

    **It saves no time** in training, as ``RigL``: masked products cost what dense ones do. And what it chooses is how many
    weights of each layer are kept: with masks shuffled within layers, networks train as well (Frankle et al. 2020).

    The weights are found as by ``RigL``. One that has no gradient on these batches, such as that of an expert to which no token
    went, is an error.

    Logged: ``sparsity`` and ``kept`` (numbers).

    Args:
        sparsity: the share of the masked weights that is zero, in [0, 1). 0 is plain training.
        batches: how many are scored on, on each rank, >= 1. 1 is the paper's.
        names: see ``RigL``.
        dense: see ``RigL``.

    Raises:
        ValueError: for other values; at setup, if there is nothing to mask, or a name means nothing; at the first batch, which
            leaves weights as they were, if a weight has no gradient.

    Sources:
        Lee et al. 2018, arXiv:1810.02340; Frankle et al. 2020, arXiv:2009.08576.
    """

    saves: ClassVar[str] = "no time: a sparse network for one training, on hardware that computes zeros as any number"
    paper: ClassVar[str] = "Lee et al. 2018, arXiv:1810.02340"
    survey: ClassVar[Survey | None] = Survey("SNIP", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, no_time)
    control: ClassVar[Control] = Control("a random mask of the same size, which stays", fixed)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **ZEROS}

    def __init__(
        self,
        sparsity: float = 0.8,
        *,
        batches: int = 1,
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        self._check_batches(batches)
        self._take(sparsity=sparsity, names=names, dense=dense)

    @override
    def scores(self, session: Session, data: Sequence[Any], batch_idx: int) -> dict[str, Tensor] | None:
        gradients = self.gradients(session, data, batch_idx)
        if gradients is None:
            return None
        return {name: connection_sensitivity(self.parameter(name).detach(), g) for name, g in gradients.items()}
