"""Efficient SAM (ESAM): perturb some of the parameters, and train on the most affected samples (Du et al. 2021)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import CHOOSERS, Rho, Share, Uphill, rivals


def sharpest(rise: Tensor, *, gamma: float) -> Tensor:
    """The ``round(gamma B)`` samples, at least 1, whose loss rises most from ``w`` to ``w + e``: the paper's ``B+``.

    Args:
        rise: ``l_i(w + e) - l_i(w)``, shape (B,).
        gamma: in (0, 1].

    Returns:
        Their indices, long, ascending. Among equal rises the first ones are taken.
    """
    k = max(1, round(gamma * len(rise)))
    return rise.argsort(descending=True, stable=True)[:k].sort().values


class EfficientSAM(Uphill):
    """Apply SAM at lower cost: perturb some of the parameters, and train on some of the samples (ESAM).

    In each micro-batch, the pass at ``w`` gives ``g`` for parameter tensors that are drawn with probability ``beta`` each
    (at least one). Only these are perturbed, by ``e = (rho / beta) g / ||g||``, with the norm over them. A forward pass
    without gradients at ``w + e`` finds the ``round(gamma B)`` of B samples whose loss rises most, and the second pass runs
    only on them.

    Use it where SAM helps and costs too much. Compared with plain training, a step costs part of a backward pass, one
    forward pass, and ``gamma`` of both. With ``beta = gamma = 1`` it is SAM.

    The loss of each sample must come from ``torch.nn.functional``, as for ``SelectiveBackprop``; the first batch is checked.

    It logs ``gradient_norm`` (of the perturbed tensors) and ``sharpness`` (the mean rise over all samples of the last
    batch).

    Args:
        rho: SAM's radius, in units of the weights. 0 is plain training.
        beta: the probability that a parameter tensor is perturbed.
        gamma: the fraction of the samples to train on.
        adaptive: whether to scale the radius of each weight by its size, as in ASAM.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,), for losses that cannot be
            seen by sample. It is used only to choose samples.

    Raises:
        ValueError: for a value out of range. With ``gamma`` below 1, at the first step, on all ranks, if the loss cannot be
            seen by sample or a batch has one sample. At any step, if a loss is NaN or infinite.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[EfficientSAM(rho=0.05, beta=0.6, gamma=0.5)])

    References:
        Du et al. 2021, "Efficient Sharpness-aware Minimization for Improved Training of Neural Networks", arXiv:2110.03141.
    """

    saves: ClassVar[str] = "part of SAM's cost: its generalization at less than twice the step cost"
    paper: ClassVar[str] = "Du et al. 2021, arXiv:2110.03141"
    constraints: ClassVar[str] = (
        "needs automatic optimization, and with gamma < 1 a mean loss of torch.nn.functional or sample_loss=; else as SAM"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rho": Uniform(0.01, 0.5, log=True), "beta": Choice((0.5, 0.6, 1.0)), "gamma": Choice((0.5, 1.0))},
        lambda profile: (
            "each sample is seen once, and no gain is known for that case"
            if profile.epochs <= 1
            else None
            if profile.visible_loss and profile.batch_size > 1
            else "the loss cannot be seen by sample"
        ),
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, in up to twice the steps; and SAM"
    )
    conflicts: ClassVar = {**rivals("LookSAM", "SharpnessAwareMinimization"), **CHOOSERS}
    checkpointed: ClassVar[tuple[str, ...]] = ("_scorer.checked",)
    stage = Stage.CHOOSE

    def __init__(
        self,
        rho: Rho = 0.05,
        *,
        beta: Share = 0.6,
        gamma: Share = 0.5,
        adaptive: bool = False,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        self.rho = rho
        self.beta = beta
        self.gamma = gamma
        self.adaptive = adaptive
        self.sample_loss = sample_loss

    @override
    def _reset(self) -> None:
        super()._reset()
        self._scorer = Scorer("EfficientSAM", self.sample_loss, bounds=False)
        self._before: Scores | None = None

    @property
    @override
    def radius(self) -> float:
        return self.rho / self.beta

    # -- the passes

    @override
    def ascended(self, step: Step, named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
        if self.beta == 1.0:
            return named
        generator = self.session.generator("EfficientSAM", step.global_step, step.batch_idx)
        drawn = torch.rand(len(named), generator=generator, dtype=torch.float32)
        limit = max(self.beta, float(drawn.min()) * (1 + 1e-6)) if len(named) else self.beta
        return [one for one, number in zip(named, drawn.tolist(), strict=True) if number < limit]

    @override
    def first(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self.gamma == 1.0:
            return proceed(batch)
        size = num_samples(batch)
        self._scorer.check_ahead(self.session, step, batch, size)
        if self.sample_loss is not None:
            self._before = self._scorer.score(step, batch, size)
            return proceed(batch)
        step.around, read = self._scorer.reading(step, size)
        try:
            output = proceed(batch)
        finally:
            step.around = None
        self._before = read()
        return output

    @override
    def second(self, step: Step, batch: Any, proceed: Proceed) -> tuple[Any, Any]:
        before = self._before
        if self.gamma == 1.0 or before is None:
            return super().second(step, batch, proceed)
        size = num_samples(batch)
        after = self._scorer.score(step, batch, size)
        agree(self.session, before.problem or after.problem)
        rise = after.means - before.means
        self._last["sharpness"] = rise.mean()
        return super().second(step, step.pick(batch, sharpest(rise, gamma=self.gamma), size), proceed)

    @override
    def risen(self, rise: Tensor) -> None:
        if self.gamma == 1.0:
            super().risen(rise)

    # -- reports and state

    @override
    def summary(self) -> str:
        if not self._passes:
            return "ESAM: no step was perturbed"
        return f"ESAM, rho {self.rho:g}: {self._passes:,} second passes, on {self.gamma:.0%} of the samples"
