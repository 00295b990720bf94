"""The base class of techniques that train on a part of each batch, chosen by the losses of its samples."""

from abc import abstractmethod
from typing import Any, ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff.data.selection._counting import CountsSamples
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
    """The ``conflicts`` of the technique ``name`` with all others that choose among a batch's samples."""
    return {other: "both choose the samples" for other in _CHOOSERS if other != name}


def random_subset(keep: float) -> dict[str, Callback]:
    """The control of a technique that trains on the fraction ``keep`` of each batch: as many samples at random."""
    return {} if keep == 1 else {f"a random {keep:.0%} of each batch": RandomSubset(keep=keep)}


def largest(scores: Tensor, *, k: int) -> Tensor:
    """Find the ``k`` samples with the largest scores.

    Args:
        scores: shape (B,).
        k: in [1, B].

    Returns:
        Their indices in ascending order, long. The first of equal scores wins.
    """
    return scores.argsort(descending=True, stable=True)[:k].sort().values


class Choosing(CountsSamples):
    """A technique whose step trains on ``round(share * B)`` samples of a batch of ``B``, chosen by their losses.

    A subclass returns the fraction from :meth:`share`, and trains on its choice in :meth:`train`. At least one sample is
    chosen. Steps whose fraction is 1 are plain and cost no extra pass, but the first step of the run always checks the loss.
    Micro-batches of an accumulation window and ranks are handled separately.

    Attributes:
        sample_loss: the user's function for a loss that is not visible per sample, or None.
    """

    constraints = "needs a mean loss of torch.nn.functional, or sample_loss=, and batches of several samples"
    needs: ClassVar[Need] = Need.STEP
    checkpointed = ("_scorer.checked",)
    stage = Stage.CHOOSE
    sample_loss: SampleLoss | None

    @override
    def _reset(self) -> None:
        super()._reset()
        self._scorer = Scorer(type(self).__name__, self.sample_loss, bounds=False)

    # -- for subclasses

    @abstractmethod
    def share(self, step: Step) -> float:
        """The fraction of this step's batch to train on, in (0, 1], the same on all ranks."""

    def score(self, step: Step, batch: Any, size: int) -> Scores:
        """Compute the losses of the batch's samples in an extra forward pass."""
        return self._scorer.score(step, batch, size)

    def problem(self, step: Step, scores: Scores, size: int) -> ValueError | None:
        """The error that makes this rank's scores unusable; all ranks raise it."""
        return scores.problem

    @abstractmethod
    def train(self, step: Step, batch: Any, proceed: Proceed, scores: Scores, size: int, k: int) -> Any:
        """Train on ``k`` samples of the batch of ``size``."""

    def plain(self, step: Step, batch: Any, proceed: Proceed, size: int) -> Any:
        """Train on the whole batch."""
        return proceed(batch)

    # -- the step

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
        if scores is None or not len(scores.means):  # no means: training_step skips this batch
            output = self.plain(step, batch, proceed, size)
        else:
            trained = max(1, round(share * size))
            output = self.train(step, batch, proceed, scores, size, trained)
        self.count(size, trained)
        return output
