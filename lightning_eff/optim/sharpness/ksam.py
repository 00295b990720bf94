"""K-SAM: SAM on the samples of each batch with the largest loss (Ni et al. 2022)."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import CHOOSERS, Rho, Share, Uphill, rivals


def largest(losses: Tensor, *, k: int) -> Tensor:
    """The ``k`` samples with the largest loss.

    Args:
        losses: ``l_i``, shape (B,).
        k: in [1, B].

    Returns:
        Their indices, long, ascending. Among equal losses the first ones are taken.
    """
    return losses.argsort(descending=True, stable=True)[:k].sort().values


class KSAM(Uphill):
    """Apply SAM only to the samples of each batch with the largest loss (K-SAM).

    A forward pass without gradients computes each sample's mean loss. Both of SAM's passes then run on the ``k = round(keep
    B)`` samples (at least 1) with the largest. Besides the extra forward pass, a step costs ``keep`` times a step of SAM. The
    mean loss is not reweighted, so the gradient is biased towards hard samples, and a wrong label is a hard sample too.
    With ``keep=1`` it is SAM; with ``rho=0`` it is Ordered SGD (Kawaguchi & Lu 2020). Each micro-batch of an accumulation
    window and each rank is handled separately.

    The loss of each sample must come from ``torch.nn.functional``, as for ``SelectiveBackprop``; the first batch is checked.

    It logs ``gradient_norm`` and ``sharpness`` of the chosen samples, as SAM does, and ``fraction``, their fraction of the
    last batch.

    Args:
        rho: SAM's radius, in units of the weights.
        keep: the fraction of each batch to train on.
        adaptive: whether to scale the radius of each weight by its size, as in ASAM.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,), for losses that cannot be
            seen by sample. It is used only to choose samples.

    Raises:
        ValueError: for a value out of range. With ``keep`` below 1, at the first step, on all ranks, if the loss cannot be
            seen by sample or a batch has one sample. At any step, if a loss is NaN or infinite.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[KSAM(rho=0.05, keep=0.25)])

    References:
        Ni et al. 2022, "K-SAM: Sharpness-Aware Minimization at the Speed of SGD", arXiv:2210.12864.
    """

    saves: ClassVar[str] = "part of SAM's cost: both passes run only on the samples with the largest loss"
    paper: ClassVar[str] = "Ni et al. 2022, arXiv:2210.12864"
    constraints: ClassVar[str] = (
        "needs automatic optimization, and with keep < 1 a mean loss of torch.nn.functional or sample_loss=; else as SAM"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rho": Uniform(0.01, 0.5, log=True), "keep": Choice((0.125, 0.25, 0.5))}, needs_samples
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero; and SAM, in fewer steps"
    )
    conflicts: ClassVar = {**rivals("EfficientSAM", "LookSAM", "SharpnessAwareMinimization"), **CHOOSERS}
    checkpointed: ClassVar[tuple[str, ...]] = ("_scorer.checked",)

    def __init__(
        self,
        rho: Rho = 0.05,
        *,
        keep: Share = 0.25,
        adaptive: bool = False,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        self.rho = rho
        self.keep = keep
        self.adaptive = adaptive
        self.sample_loss = sample_loss

    @override
    def _reset(self) -> None:
        super()._reset()
        self._scorer = Scorer("KSAM", self.sample_loss, bounds=False)

    @property
    @override
    def neutral(self) -> bool:
        return self.rho == 0.0 and self.keep == 1.0

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        if self.keep < 1.0:
            session.chain.add(Stage.CHOOSE, self._choose)

    def _choose(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        size = num_samples(batch)
        self._scorer.check_first(self.session, step, batch, size)
        scores = self._scorer.score(step, batch, size)
        agree(self.session, scores.problem)
        if len(scores.means):  # otherwise the user's step skips this batch
            k = max(1, round(self.keep * size))
            self._last["fraction"] = k / size
            batch = step.pick(batch, largest(scores.means, k=k), size)
        return proceed(batch)

    @override
    def due(self, step: Step) -> bool:
        return self.rho > 0.0

    # -- reports and state

    @override
    def summary(self) -> str:
        if "fraction" not in self._last and not self._passes:
            return "K-SAM: no step was made"
        return f"K-SAM, rho {self.rho:g}: {self._passes:,} second passes, on the {self.keep:.0%} with the largest loss"
