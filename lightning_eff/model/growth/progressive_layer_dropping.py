"""Progressive layer dropping: pass over more and more blocks, the deeper the likelier (Zhang & He 2020)."""

import functools
import math
from collections.abc import Sequence
from typing import ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._dropping import Dropping, keep_probabilities
from lightning_eff.model.growth._shallower import Shallower


def theta(u: float, *, theta_min: float, gamma: float) -> float:
    """``theta(u) = (1 - theta_min) exp(-gamma u) + theta_min``, with ``u`` in [0, 1]: from 1 down to ``theta_min``."""
    return (1.0 - theta_min) * math.exp(-gamma * u) + theta_min


def mean_kept(num_blocks: int, *, theta_min: float, gamma: float) -> float:
    """How many of ``num_blocks`` blocks a step runs, on average over the draws and over ``u`` in [0, 1].

    ``sum_i p_i`` at the mean of theta, as ``p_i`` is linear in it: ``(1 - theta_min) (1 - exp(-gamma)) / gamma +
    theta_min``.
    """
    mean = (1.0 - theta_min) * -math.expm1(-gamma) / gamma + theta_min
    return sum(keep_probabilities(mean, num_blocks=num_blocks))


def _shallower(technique: "ProgressiveLayerDropping") -> dict[str, Callback]:
    """As many blocks throughout as dropping runs on average, from the schedule and the number of blocks."""
    if technique.neutral:
        return {}
    kept = functools.partial(mean_kept, theta_min=technique.theta_min, gamma=technique.gamma)
    return {"mean depth throughout": Shallower(kept=kept, layers=technique.layers)}


class ProgressiveLayerDropping(Dropping):
    """Drop whole blocks at random for an optimizer step: few at first, soon a share that stays.

    Block ``i`` of ``L`` is kept with ``p_i = 1 - (i/L)(1 - theta(u))``, where ``theta`` falls from 1 to ``theta_min``
    over the budget. One draw holds for an optimizer step, all its micro-batches and all ranks. A dropped block does no
    work, forward or backward, and gets no gradient; of a kept one ``h + f(h)`` the branch counts ``1/p_i``, so that
    the expectation is that of the full block. Validation, test and prediction run all blocks, unscaled.

    Where blocks hand tensors on beside the hidden state (T5's position bias), the first block is always kept; where nothing
    outside the blocks is trained (adapters, freezing), the first of those that train. With
    :class:`ProgressiveStacking`, ``L`` counts the blocks that run. Under DDP, ``find_unused_parameters`` is switched on.

    A block must return its input plus something, each block must feed the next one, and nobody may read what a block sets on
    itself as it runs. The first training step checks this before anything is updated. A forward hook of your own on a dropped
    block still fires, with the block's input as its output.

    Logged: ``theta``, and ``layers_dropped``, the number of blocks that the step passed over.

    Args:
        theta_min: the limit of theta, in (0, 1]; the expected share of dropped blocks tends to
            ``(1 - theta_min)(L + 1) / 2L``. 1 is plain training.
        gamma: how fast theta falls, > 0, by the whole budget: at 100 it is down within a few percent of it.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if blocks are shared or the strategy is DDP with
            ``static_graph=True`` or with reentrant checkpointing.

    Sources:
        Zhang & He 2020, arXiv:2010.13369.
    """

    saves: ClassVar[str] = (
        "compute of the dropped blocks, forward and backward: about a quarter of all at theta_min 0.5"
    )
    paper: ClassVar[str] = "Zhang & He 2020, arXiv:2010.13369"
    constraints: ClassVar[str] = (
        "residual blocks, best pre-norm; DDP without static_graph, and with use_reentrant=False where blocks are"
        " checkpointed"
    )
    survey: ClassVar[Survey | None] = Survey("progressive layer dropping", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"theta_min": Uniform(0.4, 0.9), "gamma": Uniform(5.0, 200.0, log=True)}, needs_blocks
    )
    control: ClassVar[Control] = Control(
        "a shallower model with as many FLOPs a step: throughout the first blocks alone, as many as are kept on average",
        _shallower,
    )
    needs_budget: ClassVar[bool] = True

    def __init__(
        self, theta_min: float = 0.5, *, gamma: float = 100.0, layers: str | Sequence[str] | None = None
    ) -> None:
        if not 0.0 < theta_min <= 1.0:
            raise ValueError(
                f"ProgressiveLayerDropping(theta_min={theta_min}): expected a probability in (0, 1], that with which"
                " the last block is kept in the end. 0.5 is the paper's; 1 is plain training."
            )
        if not 0.0 < gamma < math.inf:
            raise ValueError(
                f"ProgressiveLayerDropping(gamma={gamma}): expected a finite number > 0, how fast theta falls over the"
                " budget. 100 is the paper's; to drop nothing set theta_min=1."
            )
        self.theta_min = theta_min
        self.gamma = gamma
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._theta = 1.0

    @property
    @override
    def neutral(self) -> bool:
        return self.theta_min == 1.0

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
        return f"{share:.1%} of block passes dropped, theta {self._theta:.3f} at the end, of {self._where}"
