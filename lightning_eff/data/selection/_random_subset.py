"""A random part of each batch, chosen without looking: the control of techniques that choose samples by a score."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique


class RandomSubset(Technique):
    """Train on ``round(keep * B)`` samples of each batch of ``B``, at least 1, drawn uniformly without replacement.

    No pass scores them, and their mean loss is not reweighted. It acts while the used share ``u`` of the budget is in
    ``[start, end)``, in optimizer steps whose number, counted from the run's first as 0, ``interval`` divides; other
    steps are plain. Under accumulation each micro-batch is drawn from by itself, under DDP each rank's.

    Logged: ``active``, whether the last step drew, and ``fraction``, the share of its batch that it trained on.

    Args:
        keep: the share of each batch that is trained on, in (0, 1]. 1 is plain training.
        start: from this share of the budget on, in [0, 1).
        end: up to this share of the budget, in (start, 1].
        interval: every so many optimizer steps, >= 1.

    Raises:
        ValueError: for other values; where ``start`` or ``end`` counts and the run has no budget; at the first step
            that acts, on all ranks, if a batch holds one sample only.
    """

    saves: ClassVar[str] = "forward and backward passes: a share of each batch is trained on"
    paper: ClassVar[str] = "none: a control"
    constraints: ClassVar[str] = "a batch of several samples"
    control: ClassVar[Control] = Control("itself the control of techniques that choose samples by a score")
    conflicts: ClassVar[Mapping[str, str]] = {
        "ImportanceSampling": "both choose the samples",
        "SelectiveBackprop": "both choose the samples",
    }
    needs_automatic_optimization: ClassVar[bool] = False

    def __init__(self, *, keep: float, start: float = 0.0, end: float = 1.0, interval: int = 1) -> None:
        if not 0 < keep <= 1:
            raise ValueError(
                f"RandomSubset(keep={keep}): expected a number in (0, 1], the share of each batch that is trained on. 1"
                " is plain training."
            )
        if not 0 <= start < end <= 1:
            raise ValueError(
                f"RandomSubset(start={start}, end={end}): expected 0 <= start < end <= 1, shares of the run's budget"
                " between which it acts."
            )
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"RandomSubset(interval={interval!r}): expected an integer >= 1, a number of optimizer steps."
            )
        self.keep = keep
        self.start = start
        self.end = end
        self.interval = interval
        self._reset()

    def _reset(self) -> None:
        self._checked = False
        self._active, self._fraction = False, 1.0
        self._steps = {"on": 0, "off": 0}
        self._samples = {"seen": 0, "trained": 0}

    @property
    @override
    def neutral(self) -> bool:
        return self.keep == 1.0

    @override
    def check(self, session: Session) -> None:
        if (self.start > 0 or self.end < 1) and not session.progress.limits():
            raise ValueError(
                f"RandomSubset(start={self.start}, end={self.end}): the Trainer has no end (max_steps=-1,"
                " max_epochs=-1, max_time=None), so how far the run is cannot be told. Set one of them, or start=0 and"
                " end=1."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.CHOOSE, self._link)

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
        self._fraction = trained / size
        self._steps["on" if self._active else "off"] += 1
        self._samples["seen"] += size
        self._samples["trained"] += trained
        return proceed(batch)

    def _check_first(self, session: Session, size: int) -> None:
        if self._checked:
            return
        problem = None
        if size < 2:
            problem = ValueError(
                f"RandomSubset: got a batch of {size} sample; expected several to draw from. Raise the loader's"
                " batch_size, or take the technique out."
            )
        agree(session, problem)
        self._checked = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "checked": self._checked,
            "active": self._active,
            "fraction": self._fraction,
            "steps": dict(self._steps),
            "samples": dict(self._samples),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._checked = state_dict["checked"]
        self._active, self._fraction = state_dict["active"], state_dict["fraction"]
        self._steps, self._samples = dict(state_dict["steps"]), dict(state_dict["samples"])

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"active": int(self._active), "fraction": self._fraction}

    @override
    def summary(self) -> str:
        steps, samples = self._steps, self._samples
        return (
            f"drew samples in {steps['on']:,} of {sum(steps.values()):,} steps, trained on {samples['trained']:,} of"
            f" {samples['seen']:,} samples"
        )
