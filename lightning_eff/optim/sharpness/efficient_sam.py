"""Efficient SAM (ESAM): SAM for a part of the parameters, stepped along the samples that it makes worst (Du et al. 2021)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import CHOOSERS, Uphill, check_rho, check_sample_loss, check_share, rivals


def sharpest(rise: Tensor, *, gamma: float) -> Tensor:
    """The ``round(gamma B)`` samples, at least 1, whose loss rises most from ``w`` to ``w + e``: ``B+`` of the paper.

    Args:
        rise: ``l_i(w + e) - l_i(w)``, shape (B,).
        gamma: in (0, 1].

    Returns:
        Their indices, long, ascending; of equal ones the first.
    """
    k = max(1, round(gamma * len(rise)))
    return rise.argsort(descending=True, stable=True)[:k].sort().values


class EfficientSAM(Uphill):
    """SAM at less cost: climb along some of the parameters, and descend on some of the samples (ESAM).

    Of each micro-batch, the pass at ``w`` gives ``g`` for tensors that are drawn one by one with probability ``beta``, never
    none; they alone go up, by ``e = (rho / beta) g / ||g||``, the norm being over them. A forward-only pass at ``w + e`` then
    finds the samples whose loss has risen most, and the second pass runs on these ``round(gamma B)`` of B alone. So a step
    costs, beside plain training, a part of a backward pass, one forward pass, and ``gamma`` of both. With ``beta`` and
    ``gamma`` of 1 it is SAM.

    Each sample's loss is seen through the loss functions of ``torch.nn.functional``, as by ``SelectiveBackprop``; the first
    batch is checked for it.

    Logged: ``gradient_norm``, of the tensors that went up, and ``sharpness``, the mean rise over all samples of the last batch.

    Args:
        rho: SAM's radius, >= 0, in units of the weights. 0 is plain training.
        beta: the chance that a parameter tensor goes up, in (0, 1].
        gamma: the share of the samples that is stepped along, in (0, 1].
        adaptive: scale the radius of each weight by its size, as ASAM does.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of the
            batch's samples, shape (B,). It is used to choose alone.

    Raises:
        ValueError: for other values; with ``gamma`` below 1, at the first step, on all ranks, if the loss cannot be seen by
            sample or a batch holds one sample only; at any step, if a loss is nan or infinite.

    Sources:
        Du et al. 2021, arXiv:2110.03141.
    """

    saves: ClassVar[str] = "passes of SAM: its generalisation at less than twice the cost of a step"
    paper: ClassVar[str] = "Du et al. 2021, arXiv:2110.03141"
    constraints: ClassVar[str] = (
        "automatic optimization; with gamma < 1 a mean loss of torch.nn.functional, or sample_loss=; as SAM otherwise"
    )
    survey: ClassVar[Survey | None] = Survey("efficient sharpness-aware minimization (ESAM)", zhuang="2.1", shen="5.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rho": Uniform(0.01, 0.5, log=True), "beta": Choice((0.5, 0.6, 1.0)), "gamma": Choice((0.5, 1.0))},
        lambda profile: (
            "samples are seen once, where no gain of it is known"
            if profile.epochs <= 1
            else None
            if profile.visible_loss and profile.batch_size > 1
            else "the loss cannot be seen by sample"
        ),
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, in up to twice the steps; and SAM"
    )
    conflicts: ClassVar = {**rivals("LookSAM", "SharpnessAwareMinimization"), **CHOOSERS}
    stage = Stage.CHOOSE

    def __init__(
        self,
        rho: float = 0.05,
        *,
        beta: float = 0.6,
        gamma: float = 0.5,
        adaptive: bool = False,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        check_rho("EfficientSAM", rho)
        check_share("EfficientSAM", "beta", beta, "parameter tensors that go up")
        check_share("EfficientSAM", "gamma", gamma, "the samples that is stepped along")
        check_sample_loss("EfficientSAM", sample_loss)
        self.rho = rho
        self.beta = beta
        self.gamma = gamma
        self.adaptive = adaptive
        self.sample_loss = sample_loss
        self._reset()

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

    # -- what it tells and keeps

    @override
    def summary(self) -> str:
        if not self._passes:
            return "ESAM: no step perturbed"
        return f"ESAM, rho {self.rho:g}: {self._passes:,} second passes, on {self.gamma:.0%} of the samples"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "checked": self._scorer.checked}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._scorer.checked = state_dict["checked"]
