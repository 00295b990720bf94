"""Sharpness-aware minimization: step along the gradient at ``w + e``, uphill of ``w`` (Foret et al. 2020)."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import Rho, Uphill, Used, adaptive_scale, perturbation

__all__ = ["SharpnessAwareMinimization", "adaptive_scale", "mixed", "perturbation"]


def mixed(loss: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor], *, mix: float) -> Tensor:
    """Return ``loss`` with its value, and with the gradient ``mix ∇loss + (1 - mix) g``.

    Args:
        loss: ``L(w + e)``, a scalar.
        weights: the tensors that the gradient is for.
        gradients: ``g`` of each of ``weights``, without a graph.
        mix: the fraction of the loss's own gradient, in [0, 1].
    """
    # the gradient of <g, w> is g
    linear = torch.stack([(g * w).sum().to(loss) for w, g in zip(weights, gradients, strict=True)]).sum()
    return loss + (1 - mix) * ((linear - linear.detach()) - (loss - loss.detach()))


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
        mix: the fraction of the gradient at ``w + e`` in the update; the rest is the gradient at ``w``, as in SGD. 1 is SAM,
            0 is plain training. Below 1 it keeps one more copy of the gradients.

    Raises:
        ValueError: for a value out of range.

    Example:
        >>> sam = SharpnessAwareMinimization(rho=0.05, interval=2)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[sam])

    References:
        Foret et al. 2020, "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412.
        Kwon et al. 2021, "ASAM", arXiv:2102.11600.
        Andriushchenko & Flammarion 2022, "Towards Understanding Sharpness-Aware Minimization", arXiv:2206.06232, and
        Zhao et al. 2022, arXiv:2202.03599 (the mixed gradient, which penalizes the gradient's norm).
    """

    saves: ClassVar[str] = "no time: better generalization, at up to twice the step cost"
    paper: ClassVar[str] = "Foret et al. 2020, arXiv:2010.01412"
    constraints: ClassVar[str] = (
        "needs automatic optimization; training_step runs twice, including what it prints or writes; keeps one more copy of"
        " the weights; activation checkpointing must use use_reentrant=False"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "rho": Uniform(0.01, 0.5, log=True),
            "adaptive": Choice((False, True)),
            "interval": Choice((1, 2, 5, 10)),
            "mix": Choice((1.0, 0.8, 0.5)),
        },
        lambda profile: "each sample is seen once, and no gain is known for that case" if profile.epochs <= 1 else None,
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, in up to twice the steps"
    )

    neutral_at: ClassVar[Mapping[str, Any]] = {"mix": 0.0}

    def __init__(
        self,
        rho: Rho = 0.05,
        *,
        adaptive: bool = False,
        interval: Annotated[int, Count()] = 1,
        mix: Annotated[float, Fraction()] = 1.0,
    ) -> None:
        self.rho = rho
        self.adaptive = adaptive
        self.interval = interval
        self.mix = mix

    @override
    def _reset(self) -> None:
        super()._reset()
        self._plain: Used = []

    @override
    def due(self, step: Step) -> bool:
        return step.global_step % self.interval == 0

    @override
    def found(self, used: Used) -> None:
        self._plain = used if self.mix < 1 else []

    @override
    def second(self, step: Step, batch: Any, proceed: Proceed) -> tuple[Any, Any]:
        plain, self._plain = self._plain, []
        output = proceed(batch)
        loss = loss_of(output)
        if not plain or loss is None:
            return output, batch
        scaler = getattr(self.session.trainer.precision_plugin, "scaler", None)
        factor = 1.0 if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        loss = mixed(loss, [w for _, w, _ in plain], [g / factor for _, _, g in plain], mix=self.mix)
        return ({**output, "loss": loss} if isinstance(output, Mapping) else loss), batch

    @override
    def summary(self) -> str:
        name = "ASAM" if self.adaptive else "SAM"
        if not self._passes:
            return f"{name}: no step was perturbed"
        last = float(self._last["sharpness"]) if "sharpness" in self._last else math.nan
        name += f" mixed with SGD ({self.mix:g})" if self.mix < 1 else ""
        return f"{name}, rho {self.rho:g}: {self._passes:,} second passes; the last one changed the loss by {last:+.2g}"
