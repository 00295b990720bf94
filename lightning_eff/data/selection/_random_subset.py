"""Train on a random part of each batch: the control of techniques that choose samples by a score."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._counting import CountsSamples, Keep, check_budget, check_range


class RandomSubset(CountsSamples):
    """Train on ``round(keep * B)`` samples of each batch of ``B``, drawn uniformly without replacement.

    At least one sample is drawn. No forward pass scores the samples, and their mean loss is not reweighted. It acts in every
    ``interval``-th optimizer step while the used fraction of the budget is in ``[start, end)``. Other steps are plain.
    Micro-batches of an accumulation window and ranks are handled separately.

    It logs ``active`` (whether the last step drew samples) and ``fraction`` (the fraction of the batch that was used).

    Args:
        keep: the fraction of each batch to train on. 1 is plain training.
        start: the fraction of the budget at which it begins to act.
        end: the fraction of the budget at which it stops.
        interval: the number of optimizer steps from one selection to the next.

    Raises:
        ValueError: for a value out of range. At setup, if ``start`` or ``end`` is set and the run has no budget. At the first
            step that acts, on all ranks, if a batch has one sample.
    """

    saves = "forward and backward passes: only a part of each batch is trained on"
    paper = "none: a control"
    constraints = "needs batches of several samples"
    did: ClassVar[str] = "drew"
    control = Control("itself the control of techniques that choose samples by a score")
    conflicts: ClassVar[Mapping[str, str]] = {
        "ImportanceSampling": "both choose the samples",
        "SelectiveBackprop": "both choose the samples",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 1.0}
    checkpointed = ("_checked",)
    stage = Stage.CHOOSE

    def __init__(
        self,
        *,
        keep: Keep,
        start: Annotated[float, Fraction(below=1)] = 0.0,
        end: Annotated[float, Fraction(above=0)] = 1.0,
        interval: Annotated[int, Count()] = 1,
    ) -> None:
        check_range("RandomSubset", start, end)
        self.keep = keep
        self.start = start
        self.end = end
        self.interval = interval

    @override
    def _reset(self) -> None:
        super()._reset()
        self._checked = False

    @override
    def check(self, session: Session) -> None:
        if self.start > 0 or self.end < 1:
            setting = f"RandomSubset(start={self.start}, end={self.end})"
            check_budget(session, setting, "use start=0 and end=1")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        session, size = self.session, num_samples(batch)
        trained = size
        self._active = self.start <= session.progress.u < self.end and step.global_step % self.interval == 0
        if self._active:
            self._check_first(session, size)
            trained = max(1, round(self.keep * size))
            generator = session.generator("RandomSubset", step.global_step, step.batch_idx, session.rank)
            index = torch.randperm(size, generator=generator)[:trained].sort().values
            batch = step.pick(batch, index, size)
        self.count(size, trained)
        return proceed(batch)

    def _check_first(self, session: Session, size: int) -> None:
        if self._checked:
            return
        problem = None
        if size < 2:
            problem = ValueError(
                f"RandomSubset: got a batch of {size} sample; expected several to draw from. Increase the loader's"
                " batch_size, or remove RandomSubset."
            )
        agree(session, problem)
        self._checked = True
