"""Sharpness-aware minimization: step along the gradient at ``w + e``, uphill of ``w`` (Foret et al. 2020)."""

import math
from typing import Annotated, ClassVar

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import Rho, Uphill, adaptive_scale, perturbation

__all__ = ["SharpnessAwareMinimization", "adaptive_scale", "perturbation"]


class SharpnessAwareMinimization(Uphill):
    """Update the weights along the gradient at a nearby point with a higher loss (SAM).

    The point is ``w + e`` with ``e = rho g / ||g||``, where ``g`` is the gradient at ``w``. ``training_step`` runs twice on
    the same batch, with the same random numbers and from the same buffers, metrics and attributes of the module. The first
    pass, at ``w``, is that of plain training: it logs, updates metrics and BatchNorm statistics, and gives ``g``. The
    second, at ``w + e``, leaves only its gradient, which accumulation, clipping and the optimizer treat as usual. The
    weights are restored bit for bit before the optimizer steps, and also after an exception. Other callbacks get the second
    pass's ``outputs``.

    Use it when generalization matters more than time: a perturbed step costs about twice a plain one, plus memory for one
    more copy of the weights. ``interval`` reduces the cost.

    Each micro-batch is perturbed along its own gradient, and under DDP each rank along that of its own samples, without
    communication, as in the paper (m-SAM; m is one rank's micro-batch). Where ``||g||`` is not finite, the second pass runs
    at ``w``, so a broken loss or gradient shows as in plain training. An optimizer that evaluates its closure several times
    per step, such as LBFGS, sees the perturbed loss and gradient at each evaluation.

    It logs ``gradient_norm`` (``||T g||``) and ``sharpness`` (``L(w + e) - L(w)``) of the last perturbed batch.

    Args:
        rho: the radius, in units of the weights. 0 is plain training. ASAM needs about ten times SAM's value: its authors
            use 0.5 to 1.
        adaptive: whether to scale the radius of each weight by its size (ASAM, Kwon et al. 2021), which makes it independent
            of the scale of the layers: ``e = rho T^2 g / ||T g||`` with ``T = |w| + 0.01``, and ``T = 1`` for biases.
        interval: the number of optimizer steps from one perturbed step to the next, beginning with the first step. The
            steps between cost nothing extra.

    Raises:
        ValueError: for a value out of range.

    Example:
        >>> sam = SharpnessAwareMinimization(rho=0.05, interval=2)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[sam])

    References:
        Foret et al. 2020, "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412.
        Kwon et al. 2021, "ASAM", arXiv:2102.11600.
    """

    saves: ClassVar[str] = "no time: better generalization, at up to twice the step cost"
    paper: ClassVar[str] = "Foret et al. 2020, arXiv:2010.01412"
    constraints: ClassVar[str] = (
        "needs automatic optimization; training_step runs twice, including what it prints or writes; keeps one more copy of"
        " the weights; activation checkpointing must use use_reentrant=False"
    )
    survey: ClassVar[Survey | None] = Survey("sharpness-aware minimization", zhuang="2.1", shen="5.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "rho": Uniform(0.01, 0.5, log=True),
            "adaptive": Choice((False, True)),
            "interval": Choice((1, 2, 5, 10)),
        },
        lambda profile: "each sample is seen once, and no gain is known for that case" if profile.epochs <= 1 else None,
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, in up to twice the steps"
    )

    def __init__(self, rho: Rho = 0.05, *, adaptive: bool = False, interval: Annotated[int, Count()] = 1) -> None:
        self.rho = rho
        self.adaptive = adaptive
        self.interval = interval

    @override
    def due(self, step: Step) -> bool:
        return step.global_step % self.interval == 0

    @override
    def summary(self) -> str:
        name = "ASAM" if self.adaptive else "SAM"
        if not self._passes:
            return f"{name}: no step was perturbed"
        last = float(self._last["sharpness"]) if "sharpness" in self._last else math.nan
        return f"{name}, rho {self.rho:g}: {self._passes:,} second passes; the last one changed the loss by {last:+.2g}"
