"""A random mask that stays: the control of techniques that choose which weights are zero."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.allotting import Distribution
from lightning_eff.model.sparsity._masks.masked import Masked, rivals
from lightning_eff.model.sparsity._masks.rewired import random_masks


class RandomMask(Masked):
    """Let ``round(sparsity n)`` of a weight's ``n`` numbers be zero from the first step on, drawn uniformly.

    Args:
        sparsity: the share that is zero, in [0, 1). 0 is plain training.
        distribution: "uniform", the same share of each weight; "erk", a larger share of large ones.
        names: see ``RigL``.
        dense: see ``RigL``.
        block: see ``RigL``.

    Raises:
        ValueError: as ``RigL``.
    """

    saves: ClassVar[str] = "nothing: a control"
    paper: ClassVar[str] = "none: a control"
    control: ClassVar[Control] = Control("itself the control of techniques that choose which weights are zero")
    conflicts: ClassVar[Mapping[str, str]] = rivals("RandomMask")

    def __init__(
        self,
        *,
        sparsity: float,
        distribution: Distribution = "uniform",
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
        block: Sequence[int] = (1, 1),
    ) -> None:
        self._take(sparsity=sparsity, distribution=distribution, names=names, dense=dense, block=block)

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return random_masks(self, session)


def fixed(technique: Masked) -> Mapping[str, RandomMask]:
    """The arm that holds a technique against a random mask of the same size; none where it masks nothing."""
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
