"""K-SAM: both of SAM's gradients on the samples of largest loss alone (Ni et al. 2022)."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import CHOOSERS, Uphill, check_rho, check_sample_loss, check_share, rivals


def largest(losses: Tensor, *, k: int) -> Tensor:
    """The ``k`` samples of largest loss.

    Args:
        losses: ``l_i``, shape (B,).
        k: in [1, B].

    Returns:
        Their indices, long, ascending; of equal ones the first.
    """
    return losses.argsort(descending=True, stable=True)[:k].sort().values


class KSAM(Uphill):
    """Find the samples of largest loss in each batch, and take SAM's step on them alone (K-SAM).

    A forward-only pass finds each sample's mean loss; the step, with both its passes, is then that of SAM on the
    ``k = round(keep B)`` samples, at least 1, that have the largest: beside that pass it costs ``keep`` times SAM. Their mean
    loss is not reweighted, so the gradient is biased towards hard samples, and a wrong label is a hard sample too. With
    ``keep=1`` it is SAM, with ``rho=0`` Ordered SGD (Kawaguchi & Lu 2020). Under accumulation each micro-batch is chosen from
    by itself, under DDP each rank's.

    Each sample's loss is seen through the loss functions of ``torch.nn.functional``, as by ``SelectiveBackprop``; the first
    batch is checked for it.

    Logged: ``gradient_norm`` and ``sharpness`` as SAM does, on the samples chosen, and ``fraction``, the share of the last
    batch that they are.

    Args:
        rho: SAM's radius, >= 0, in units of the weights.
        keep: the share of each batch that is trained on, in (0, 1].
        adaptive: scale the radius of each weight by its size, as ASAM does.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of the
            batch's samples, shape (B,). It is used to choose alone.

    Raises:
        ValueError: for other values; with ``keep`` below 1, at the first step, on all ranks, if the loss cannot be seen by
            sample or a batch holds one sample only; at any step, if a loss is nan or infinite.

    Sources:
        Ni et al. 2022, arXiv:2210.12864.
    """

    saves: ClassVar[str] = "passes of SAM: both run on the samples of largest loss alone"
    paper: ClassVar[str] = "Ni et al. 2022, arXiv:2210.12864"
    constraints: ClassVar[str] = (
        "automatic optimization; with keep < 1 a mean loss of torch.nn.functional, or sample_loss=; as SAM otherwise"
    )
    survey: ClassVar[Survey | None] = Survey("K-SAM", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rho": Uniform(0.01, 0.5, log=True), "keep": Choice((0.125, 0.25, 0.5))}, needs_samples
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero; and SAM, in fewer steps"
    )
    conflicts: ClassVar = {**rivals("EfficientSAM", "LookSAM", "SharpnessAwareMinimization"), **CHOOSERS}

    def __init__(
        self,
        rho: float = 0.05,
        *,
        keep: float = 0.25,
        adaptive: bool = False,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        check_rho("KSAM", rho)
        check_share("KSAM", "keep", keep, "each batch that is trained on")
        check_sample_loss("KSAM", sample_loss)
        self.rho = rho
        self.keep = keep
        self.adaptive = adaptive
        self.sample_loss = sample_loss
        self._reset()

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
        if len(scores.means):  # else the user's step skips this batch
            k = max(1, round(self.keep * size))
            self._last["fraction"] = k / size
            batch = step.pick(batch, largest(scores.means, k=k), size)
        return proceed(batch)

    @override
    def due(self, step: Step) -> bool:
        return self.rho > 0.0

    # -- what it tells and keeps

    @override
    def summary(self) -> str:
        if "fraction" not in self._last and not self._passes:
            return "K-SAM: no step made"
        return f"K-SAM, rho {self.rho:g}: {self._passes:,} second passes, on the {self.keep:.0%} of largest loss"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "checked": self._scorer.checked}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._scorer.checked = state_dict["checked"]
