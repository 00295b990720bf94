"""Progressive layer dropping: drop more and more blocks at random, deeper ones more often (Zhang & He 2020)."""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Fraction, Layers, Number
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import SearchSpace, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._dropping import Dropping, keep_probabilities
from lightning_eff.model.growth._shallower import Shallower


def theta(u: float, *, theta_min: float, gamma: float) -> float:
    """Return ``theta(u) = (1 - theta_min) exp(-gamma u) + theta_min``: from 1 at ``u`` = 0 down to ``theta_min``."""
    return (1.0 - theta_min) * math.exp(-gamma * u) + theta_min


def mean_kept(num_blocks: int, *, theta_min: float, gamma: float) -> float:
    """Return how many of ``num_blocks`` blocks a step runs, averaged over the draws and over ``u`` in [0, 1].

    It is ``sum_i p_i`` at the mean of theta, since ``p_i`` is linear in it:
    ``(1 - theta_min) (1 - exp(-gamma)) / gamma + theta_min``.
    """
    mean = (1.0 - theta_min) * -math.expm1(-gamma) / gamma + theta_min
    return sum(keep_probabilities(mean, num_blocks=num_blocks))


def _shallower(technique: "ProgressiveLayerDropping") -> dict[str, Callback]:
    """Make the control run: throughout, as many blocks as dropping runs on average."""
    if technique.neutral:
        return {}
    kept = functools.partial(mean_kept, theta_min=technique.theta_min, gamma=technique.gamma)
    return {"mean depth throughout": Shallower(kept=kept, layers=technique.layers)}


class ProgressiveLayerDropping(Dropping):
    """Skip whole transformer blocks at random: few at first, and soon a constant fraction of them.

    Block ``i`` of ``L`` is kept with probability ``p_i = 1 - (i/L)(1 - theta(u))``, where ``theta`` falls from 1 to
    ``theta_min`` over the budget. One draw holds for an optimizer step, with all its micro-batches and ranks. A dropped
    block does no work, forward or backward, and gets no gradient. A kept block ``h + f(h)`` has its residual branch
    scaled by ``1/p_i``, so the expected output is that of the full block. Validation, test and prediction run all
    blocks, unscaled.

    Use it to pretrain deep pre-norm transformers. It saves about a quarter of the compute at ``theta_min=0.5`` and
    changes training: each step trains a shallower network.

    A block must return its input plus something, each block must feed the next one, and nothing may read attributes
    that a block sets while it runs. The first training step checks this before anything is updated. Under DDP,
    ``find_unused_parameters`` is switched on. A forward hook of your own on a dropped block still fires, with the
    block's input as its output.

    At least one block runs in every step. If none is drawn, which the paper's rule allows, the first block runs. At
    ``theta_min=0.5`` this concerns 1 step in 171 with 4 blocks, and 1 in 76 million with 12. Its ``p_1`` counts this.
    One block is always kept in two cases. Where blocks pass further tensors on (T5's position bias), it is the first
    block. Where nothing outside the blocks is trained (adapters, freezing), it is the first block that trains. With
    :class:`ProgressiveStacking`, ``L`` counts the blocks that run.

    Logged: ``theta``, and ``layers_dropped``, the number of blocks that the step skipped.

    Args:
        theta_min: the limit of theta, the probability with which the last block is kept at the end. The expected
            fraction of dropped blocks tends to ``(1 - theta_min)(L + 1) / 2L``. 1 is plain training. Also accepted as
            ``theta``.
        gamma: the speed at which theta falls, relative to the whole budget. At 100 it reaches its limit within a few
            percent of the budget.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if blocks are shared, or under DDP with ``static_graph=True`` or
            reentrant checkpointing.

    Example:
        >>> trainer = L.Trainer(max_steps=100_000, callbacks=[ProgressiveLayerDropping(theta_min=0.5)])

    References:
        Zhang & He 2020, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping",
        arXiv:2010.13369.
    """

    saves = "compute of the dropped blocks, forward and backward: about a quarter of the total at theta_min 0.5"
    paper = "Zhang & He 2020, arXiv:2010.13369"
    constraints = (
        "residual blocks, best pre-norm; DDP without static_graph, and with use_reentrant=False where blocks are"
        " checkpointed"
    )
    search_space = SearchSpace({"theta_min": Uniform(0.4, 0.9), "gamma": Uniform(5.0, 200.0, log=True)}, needs_blocks)
    control = Control(
        "a shallower model with as many FLOPs per step: only the first blocks, as many as are kept on average",
        _shallower,
    )
    needs_budget: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"theta_min": 1.0}

    def __init__(
        self,
        theta_min: Annotated[float, Fraction(above=0), Alias("theta")] = 0.5,
        *,
        gamma: Annotated[float, Number(above=0, hint="To drop nothing, use theta_min=1.")] = 100.0,
        layers: Layers | None = None,
    ) -> None:
        self.theta_min = theta_min
        self.gamma = gamma
        self.layers = layers

    def _reset(self) -> None:
        super()._reset()
        self._theta = 1.0

    @override
    def find(self, session: Session) -> list[BlockStack]:
        return [session.stack(self.layers, who="ProgressiveLayerDropping")]

    @override
    def probabilities(self, session: Session, num_blocks: int) -> list[float]:
        self._theta = theta(session.progress.u, theta_min=self.theta_min, gamma=self.gamma)
        return keep_probabilities(self._theta, num_blocks=num_blocks)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"theta": self._theta, "layers_dropped": self._dropped}

    @override
    def summary(self) -> str:
        share = self._passed_over / max(self._passes, 1)
        return f"dropped {share:.1%} of block passes, of {self._where}; theta {self._theta:.3f} at the end"
