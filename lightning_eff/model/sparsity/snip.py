"""SNIP: prune before the first step by the effect of each weight on the loss (Lee et al. 2018)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core.session import Session
from lightning_eff.model.sparsity._masks.arguments import Dense, Sparsity, Weights
from lightning_eff.model.sparsity._masks.masked import rivals
from lightning_eff.model.sparsity._masks.scored import ZEROS, Scored

WHO = "SNIP"


def connection_sensitivity(weight: Tensor, gradient: Tensor) -> Tensor:
    """``|dL / dc|`` at ``c = 1`` of the loss with weights ``c * theta``, for each element of a weight.

    Args:
        weight: ``theta``.
        gradient: ``dL / d theta``, of the same shape.
    """
    # |∂L(c ⊙ θ)/∂c|_{c=1} = |g ⊙ θ|
    return (gradient * weight).abs()


class SNIP(Scored):
    """Set the weights that matter least to the loss to zero before the first step, and keep them at zero.

    The score of a weight is ``|g theta|``: how much the loss changes with a factor on the weight. ``g`` is the mean gradient
    over ``batches`` training batches of each rank. The largest scores of all weights together are kept, so some layers keep a
    larger fraction than others. In a module that steps several optimizers itself, such as a GAN, the gradients are those with
    which each optimizer would step, and scores are compared among its own weights.

    Use it to get a sparse network in one training. **It saves no time** in training, as ``RigL``: masked products cost the
    same as dense ones. Its benefit is the choice of how many weights each layer keeps: with masks shuffled within layers,
    networks train as well (Frankle et al. 2020). It finds weights as ``RigL`` does. It logs ``sparsity`` and ``kept``
    (elements).

    Args:
        sparsity: the fraction of the masked weights that is zero. 0 is plain training.
        batches: the number of batches for the scores, on each rank. 1 is the paper's.
        names: the weights to mask, see ``RigL``.
        dense: the weights to leave alone, see ``RigL``.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask or a name matches nothing. On the first
            batch, before any weight has changed, if a weight has no gradient, such as an expert that gets no token.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SNIP(0.8, batches=4)])

    References:
        Lee et al. 2018, "SNIP: Single-shot Network Pruning based on Connection Sensitivity", arXiv:1810.02340.
        Frankle et al. 2020, "Pruning Neural Networks at Initialization: Why are We Missing the Mark?", arXiv:2009.08576.
    """

    paper = "Lee et al. 2018, arXiv:1810.02340"
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **ZEROS}

    def __init__(
        self,
        sparsity: Sparsity = 0.8,
        *,
        batches: Annotated[int, Count()] = 1,
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.batches = batches
        self._take(sparsity=sparsity, names=names, dense=dense)

    @override
    def scores(self, session: Session, data: Sequence[Any], batch_idx: int) -> dict[str, Tensor] | None:
        gradients = self.gradients(session, data, batch_idx)
        if gradients is None:
            return None
        return {name: connection_sensitivity(self.parameter(name).detach(), g) for name, g in gradients.items()}
