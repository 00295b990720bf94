"""What all techniques share that train on a part of each batch, chosen by its samples' losses."""

from abc import abstractmethod
from typing import Any, ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique
from lightning_eff.data.selection._random_subset import RandomSubset

_CHOOSERS = (
    "AutoAssist",
    "EfficientSAM",
    "ImportanceSampling",
    "KSAM",
    "LossBiasedSampling",
    "OrderedSGD",
    "ProxySelection",
    "RHOLoss",
    "RandomSubset",
    "SelectiveBackprop",
)


def others(name: str) -> dict[str, str]:
    """``conflicts`` of the technique ``name`` with all others that choose among a batch's samples."""
    return {other: "both choose the samples" for other in _CHOOSERS if other != name}


def random_subset(keep: float) -> dict[str, Callback]:
    """The control of a technique that trains on this share of each batch: as many at random."""
    return {} if keep == 1 else {f"a random {keep:.0%} of each batch": RandomSubset(keep=keep)}


def largest(scores: Tensor, *, k: int) -> Tensor:
    """The ``k`` samples of largest score.

    Args:
        scores: shape (B,).
        k: in [1, B].

    Returns:
        Their indices, long, ascending; of equal ones the first.
    """
    return scores.argsort(descending=True, stable=True)[:k].sort().values


def check_keep(who: str, keep: float) -> None:
    """Raise ``ValueError`` unless ``keep`` is a share in (0, 1]."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(
            f"{who}({keep=}): expected a number in (0, 1], the share of each batch that is trained on. 0.5 is half of it, 1"
            " is plain training."
        )


def check_sample_loss(who: str, sample_loss: object) -> None:
    """Raise ``ValueError`` unless it is a function, or None."""
    if sample_loss is not None and not callable(sample_loss):
        raise ValueError(
            f"{who}({sample_loss=}): expected a function of (module, batch) that returns the losses of the batch's samples, or"
            " None."
        )


class Choosing(Technique):
    """A technique whose step trains on ``round(share * B)`` samples of a batch of ``B``, at least 1, chosen by their losses.

    A subclass says the share by :meth:`share`, and trains on what it chooses in :meth:`train`. Steps whose share is 1 are
    plain and cost no pass; the run's first one looks at the loss in any case. Under accumulation each micro-batch is chosen
    from by itself, under DDP each rank's.

    Attributes:
        sample_loss: the user's function for a loss that cannot be seen by sample, or None.
    """

    constraints: ClassVar[str] = "a mean loss of torch.nn.functional, or sample_loss=; a batch of several samples"
    needs: ClassVar[Need] = Need.STEP
    sample_loss: SampleLoss | None

    def _reset(self) -> None:
        self._scorer = Scorer(type(self).__name__, self.sample_loss, bounds=False)
        self._active, self._fraction = False, 1.0
        self._steps = {"on": 0, "off": 0}
        self._samples = {"seen": 0, "trained": 0}

    # -- what subclasses say

    @abstractmethod
    def share(self, step: Step) -> float:
        """The share of this step's batch that is trained on, in (0, 1]; the same on all ranks."""

    def score(self, step: Step, batch: Any, size: int) -> Scores:
        """The losses of the batch's samples, by a forward pass of its own."""
        return self._scorer.score(step, batch, size)

    def problem(self, step: Step, scores: Scores, size: int) -> ValueError | None:
        """What makes the scores of this rank unusable, to be raised on all."""
        return scores.problem

    @abstractmethod
    def train(self, step: Step, batch: Any, proceed: Proceed, scores: Scores, size: int, k: int) -> Any:
        """Train on ``k`` samples of the batch of ``size``."""

    def plain(self, step: Step, batch: Any, proceed: Proceed, size: int) -> Any:
        """Train on the whole batch."""
        return proceed(batch)

    # -- the step

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.CHOOSE, self._link)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        size = trained = num_samples(batch)
        share = self.share(step)
        self._active = share < 1
        scores = None
        if self._active:
            self._scorer.check_first(self.session, step, batch, size)
            scores = self.score(step, batch, size)
            agree(self.session, self.problem(step, scores, size))
        else:
            self._scorer.check_ahead(self.session, step, batch, size)
        if scores is None or not len(scores.means):  # of the latter kind, the user's step skips this batch
            output = self.plain(step, batch, proceed, size)
        else:
            trained = max(1, round(share * size))
            output = self.train(step, batch, proceed, scores, size, trained)
        self._fraction = trained / size
        self._steps["on" if self._active else "off"] += 1
        self._samples["seen"] += size
        self._samples["trained"] += trained
        return output

    # -- what it tells and keeps

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "active": self._active,
            "fraction": self._fraction,
            "steps": dict(self._steps),
            "samples": dict(self._samples),
            "checked": self._scorer.checked,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._active, self._fraction = state_dict["active"], state_dict["fraction"]
        self._steps, self._samples = dict(state_dict["steps"]), dict(state_dict["samples"])
        self._scorer.checked = state_dict["checked"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"active": int(self._active), "fraction": self._fraction}

    @override
    def summary(self) -> str:
        steps, samples = self._steps, self._samples
        return (
            f"chose samples in {steps['on']:,} of {sum(steps.values()):,} steps, trained on {samples['trained']:,} of"
            f" {samples['seen']:,} samples"
        )
