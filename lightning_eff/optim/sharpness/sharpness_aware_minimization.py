"""Sharpness-aware minimisation: step along the gradient at ``w + e``, uphill of ``w`` (Foret et al. 2020)."""

import math
from typing import ClassVar

from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import Uphill, adaptive_scale, check_rho, perturbation

__all__ = ["SharpnessAwareMinimization", "adaptive_scale", "perturbation"]


class SharpnessAwareMinimization(Uphill):
    """Update ``w`` along the gradient at ``w + e``, where ``e = rho g / ||g||`` climbs from ``w`` (SAM).

    ``training_step`` runs twice on the same batch, with the same random numbers and from the same buffers, metrics and
    attributes of the module. The first pass, at ``w``, is that of plain training: it logs, updates metrics and
    BatchNorm statistics, and gives ``g``. The second, at ``w + e``, leaves no trace but its gradient, which
    accumulation, clipping and the optimizer treat as any other. The weights are then put back bit for bit, before the
    optimizer steps and also after an exception. What ``training_step`` returns to Lightning, and thus to other
    callbacks as ``outputs``, is the second pass's.

    Each micro-batch is perturbed along its own gradient, and under DDP each rank along that of its own samples, without
    communication, as in the paper (m-SAM; m is the micro-batch of one rank). Where ``||g||`` is not finite the second
    pass runs at ``w``, so that a broken loss or gradient shows as in plain training. An optimizer that evaluates its
    closure several times a step, such as LBFGS, sees the perturbed loss and gradient at each evaluation.

    Logged: ``gradient_norm`` is ``||T g||``, ``sharpness`` is ``L(w + e) - L(w)``, both of the last perturbed batch.

    Args:
        rho: the radius, >= 0, in units of the weights. 0 is plain training. ASAM wants about ten times SAM's: its
            authors use 0.5 to 1.
        adaptive: scale the radius of each weight by its size, so that it does not depend on how the layers are scaled
            (ASAM, Kwon et al. 2021): ``e = rho T^2 g / ||T g||`` with ``T = |w| + 0.01``, for biases ``T = 1``.
        interval: optimizer steps, >= 1; only each ``interval``-th step is perturbed, starting with the first, and the
            others cost nothing extra.

    Raises:
        ValueError: if ``rho`` is negative or not finite, or ``interval`` is no integer >= 1.

    Sources:
        Foret et al. 2020, arXiv:2010.01412; Kwon et al. 2021, arXiv:2102.11600.
    """

    saves: ClassVar[str] = "nothing in time: better generalisation, at up to twice the cost of a step"
    paper: ClassVar[str] = "Foret et al. 2020, arXiv:2010.01412"
    constraints: ClassVar[str] = (
        "automatic optimization; training_step runs twice, so what it writes or prints comes twice; memory for one more"
        " copy of the weights; activation checkpointing only with use_reentrant=False"
    )
    survey: ClassVar[Survey | None] = Survey("sharpness-aware minimization", zhuang="2.1", shen="5.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "rho": Uniform(0.01, 0.5, log=True),
            "adaptive": Choice((False, True)),
            "interval": Choice((1, 2, 5, 10)),
        },
        lambda profile: "samples are seen once, where no gain of it is known" if profile.epochs <= 1 else None,
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, in up to twice the steps"
    )

    def __init__(self, rho: float = 0.05, *, adaptive: bool = False, interval: int = 1) -> None:
        check_rho("SharpnessAwareMinimization", rho)
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"SharpnessAwareMinimization(interval={interval!r}): expected an integer >= 1, because every"
                " interval-th optimizer step is perturbed. 1 perturbs every step."
            )
        self.rho = rho
        self.adaptive = adaptive
        self.interval = interval
        self._reset()

    @override
    def due(self, step: Step) -> bool:
        return step.global_step % self.interval == 0

    @override
    def summary(self) -> str:
        name = "ASAM" if self.adaptive else "SAM"
        if not self._passes:
            return f"{name}: no step perturbed"
        last = float(self._last["sharpness"]) if "sharpness" in self._last else math.nan
        return f"{name}, rho {self.rho:g}: {self._passes:,} second passes, loss {last:+.2g} uphill in the last"
