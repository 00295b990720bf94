"""Loss-biased importance sampling: draw samples by loss and give hard ones more weight (Katharopoulos & Fleuret 2017)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import Choosing, others, random_subset
from lightning_eff.data.selection._counting import check_budget
from lightning_eff.data.selection._weighing import draw, negative, probabilities, weighing

_ONE_LOSS = "it reweights the samples of the step's own loss only"


def biased_weights(p: Tensor, losses: Tensor, *, size: int, k: float) -> Tensor:
    """Compute ``w'_j ~ (N p_j)^-k``, rescaled so that the weighted losses sum to those of the unbiased ``w_j = 1 / (N p_j)``.

    Args:
        p: the probabilities of the ``b`` drawn samples, shape (b,), > 0.
        losses: their losses ``l_j``, shape (b,), >= 0.
        size: the number ``N`` of samples that they were drawn from.
        k: the exponent. 1 is unbiased. A smaller one gives hard samples more weight.

    Returns:
        Shape (b,), float64.
    """
    w = 1 / (size * p.double())
    biased = w**k
    scale = (biased * losses.double()).sum()
    return biased * ((w * losses.double()).sum() / scale) if scale > 0 else biased


def _random_subset(technique: "LossBiasedSampling") -> Mapping[str, Callback]:
    return {} if technique.neutral else random_subset(1 / technique.presample)


class LossBiasedSampling(Choosing):
    """Train on samples that are drawn in proportion to their loss, with weights that favor hard samples.

    The loader's batch of ``B`` samples is the presample. A forward pass without gradients computes its losses. ``b = round(B /
    presample)`` samples (at least one) are drawn with replacement, with ``p_i = l_i / sum l``. The loss of each is weighted in
    proportion to ``(B p_i)^-k``, and the weights are rescaled so that the weighted losses sum to those of unbiased weights.
    With ``k=1`` the expected gradient of the step is that of the whole batch. With a smaller ``k`` hard samples count more than
    in the mean loss, as in the paper. ``k=0`` does not reweight. If all losses are 0, draws are uniform. To train on as many
    samples per step as before, multiply the loader's batch size by ``presample``.

    Use it where many samples are already learned. A wrong label has a large loss too, so avoid it on noisy labels. Unlike
    :class:`ImportanceSampling` it is biased for ``k`` below 1, and it draws from ``start`` on whether or not that pays. Each
    step in which it acts costs one extra forward pass. Micro-batches of an accumulation window and ranks are handled
    separately.

    ``training_step`` must return a sum of mean-reduced losses from ``torch.nn.functional`` (or ``torch.nn``), with one row
    or one group of consecutive rows per sample. The first batch is checked. For any other loss, give ``sample_loss``. The
    drawn samples are then trained on with the weighted mean of its values, and ``training_step`` (with its logging) runs only
    in plain steps.

    It logs ``active`` (whether the last step drew samples) and ``fraction`` (the fraction of the batch that was used).

    Args:
        presample: the number of samples to score for each sample to draw, ``B / b``.
        k: the exponent of the weights. 0.5 is the paper's.
        start: the fraction of the budget at which it begins to act. 1 is plain training.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,).

    Raises:
        ValueError: for a value out of range. At setup, if ``start`` is set and the run has no budget. At the first step, if the
            loss of a sample cannot be seen or a batch has one sample. At any step, on all ranks, if a loss is NaN, infinite or
            negative.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LossBiasedSampling(presample=3, k=0.5)])

    References:
        Katharopoulos and Fleuret 2017, "Biased Importance Sampling for Deep Neural Network Training", arXiv:1706.00043. The
        losses come from the model itself. The paper's LSTM that predicts them is not implemented.
    """

    saves = "backward passes: a third of each batch is trained on, drawn by loss"
    paper = "Katharopoulos & Fleuret 2017, arXiv:1706.00043"
    constraints = "needs a mean loss >= 0 of torch.nn.functional, or sample_loss=, and batches of several samples"
    search_space = SearchSpace(
        {"presample": Uniform(1.5, 5.0), "k": Choice((0.0, 0.5, 1.0)), "start": Choice((0.0, 0.3))}, needs_samples
    )
    control = Control("as many samples drawn at random, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = {**others("LossBiasedSampling"), "SAF": _ONE_LOSS, "MESA": _ONE_LOSS}
    neutral_at: ClassVar[Mapping[str, Any]] = {"start": 1}

    def __init__(
        self,
        presample: Annotated[float, Number(above=1)] = 3.0,
        *,
        k: Annotated[float, Fraction()] = 0.5,
        start: Annotated[float, Fraction()] = 0.0,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        self.presample, self.k, self.start = presample, k, start
        self.sample_loss = sample_loss

    @override
    def check(self, session: Session) -> None:
        if self.start > 0:
            check_budget(session, f"LossBiasedSampling(start={self.start})", "use start=0")

    @override
    def share(self, step: Step) -> float:
        return 1 / self.presample if self.session.progress.u >= self.start else 1.0

    @override
    def problem(self, step: Step, scores: Scores, size: int) -> ValueError | None:
        if scores.problem is not None:
            return scores.problem
        return negative("LossBiasedSampling", scores.losses, "Use ImportanceSampling, or another loss.")

    @override
    def train(self, step: Step, batch: Any, proceed: Proceed, scores: Scores, size: int, k: int) -> Any:
        p = probabilities(scores.losses)
        key = ("LossBiasedSampling", step.global_step, step.batch_idx, self.session.rank)
        index = draw(p, k, self.session.generator(*key))
        w = biased_weights(p[index], scores.losses[index], size=size, k=self.k)
        step.around = weighing(self.session, w.float(), size, scores, self.sample_loss)
        return proceed(step.pick(batch, index, size))
