"""A fixed random mask: the control of techniques that choose which weights are zero."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.arguments import Dense, Distribution, Sides, Sparsity, Weights
from lightning_eff.model.sparsity._masks.masked import Masked, rivals
from lightning_eff.model.sparsity._masks.rewired import random_masks


class RandomMask(Masked):
    """Keep ``round(sparsity n)`` of a weight's ``n`` elements at zero from the first step on, drawn uniformly.

    Args:
        sparsity: the fraction that is zero. 0 is plain training.
        distribution: how zeros are distributed. "uniform" is the same fraction of each weight, "erk" a larger one of large
            weights.
        names: the weights to mask, see ``RigL``.
        dense: the weights to leave alone, see ``RigL``.
        block: rows and columns of a block, see ``RigL``.

    Raises:
        ValueError: as ``RigL``.
    """

    saves = "nothing: a control"
    paper = "none: a control"
    control = Control("it is the control of techniques that choose which weights are zero")
    conflicts: ClassVar[Mapping[str, str]] = rivals("RandomMask")

    def __init__(
        self,
        *,
        sparsity: Sparsity,
        distribution: Distribution = "uniform",
        names: Weights = None,
        dense: Dense = (),
        block: Sides = (1, 1),
    ) -> None:
        self._take(sparsity=sparsity, distribution=distribution, names=names, dense=dense, block=block)

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return random_masks(self, session)


def fixed(technique: Masked) -> Mapping[str, RandomMask]:
    """The arm that compares a technique with a random mask of the same size; none if it masks nothing."""
    if technique.neutral:
        return {}
    arm = RandomMask(
        sparsity=technique.sparsity,
        distribution=technique.distribution,
        names=technique.names,
        dense=technique.dense,
        block=technique.block,
    )
    return {"random mask": arm}
