"""Loss-biased importance sampling: samples drawn by loss, hard ones left heavier (Katharopoulos & Fleuret 2017)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import Choosing, check_sample_loss, others, random_subset
from lightning_eff.data.selection._weighing import draw, negative, probabilities, weighing

_ONE_LOSS = "it weighs samples by the step's own loss alone"


def biased_weights(p: Tensor, losses: Tensor, *, size: int, k: float) -> Tensor:
    """``w'_j ~ (N p_j)^-k``, rescaled so that ``sum_j w'_j l_j = sum_j w_j l_j`` with the unbiased ``w_j = 1 / (N p_j)``.

    Args:
        p: the probabilities of the b samples drawn, shape (b,), > 0.
        losses: their losses ``l_j``, shape (b,), >= 0.
        size: the number N of samples that they were drawn from.
        k: the exponent; 1 is unbiased, and with less of it hard samples weigh more.

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
    """Train on ``b = B / presample`` samples of each batch of ``B``, drawn by their losses and weighted by a power of the odds.

    The loader's batch is the presample. A forward-only pass finds its ``B`` losses; ``b = round(B / presample)`` samples (at
    least 1) are drawn with replacement with ``p_i = l_i / sum l``, and the loss of each is weighted in proportion to
    ``(B p_i)^-k``, so that the weighted losses sum to what the unbiased weights would give. ``k=1`` is importance sampling:
    on average over draws the step's gradient is the whole batch's. With ``k`` below 1 hard samples count more than in the
    mean loss, as in the paper; ``k=0`` does not reweight. To train on as many samples as before, give the loader
    ``presample`` times the batch size. Where all losses are 0, draws are uniform. A wrong label has a large loss, too.

    It differs from ``ImportanceSampling`` by the exponent and by acting from ``start`` on, whether or not that pays; that one
    bounds gradients, never biases them, and switches itself on.

    The loss is seen through the loss functions of ``torch.nn.functional`` (and so ``torch.nn``'s modules):
    ``training_step`` must return the sum of their mean-reduced values, whose rows lie sample by sample; the first batch
    is checked for it. Any other loss needs ``sample_loss``; drawn samples are then trained on with the weighted mean of what
    it returns, and ``training_step`` (with its logging) runs in plain steps only. Under accumulation each micro-batch is
    drawn from by itself, under DDP each rank's.

    Logged: ``active``, whether the last step drew, and ``fraction``, the share of its batch that it trained on.

    Args:
        presample: ``B / b``, how many samples are scored for each that is drawn, > 1.
        k: the exponent of the weights, in [0, 1]; 0.5 is the paper's.
        start: from this share of the budget on, in [0, 1]. 1 is plain training.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,).

    Raises:
        ValueError: for other values; where ``start`` counts and the run has no budget; at the first step, on all ranks, if
            the loss cannot be seen by sample or a batch holds one sample only; at any step, on all ranks, if a loss is nan,
            infinite or negative.

    Sources:
        Katharopoulos & Fleuret 2017, arXiv:1706.00043. Losses are the model's own: the paper's LSTM that predicts them from
        earlier ones is not built.
    """

    saves: ClassVar[str] = "backward passes: a third of each batch is trained on, drawn by loss"
    paper: ClassVar[str] = "Katharopoulos & Fleuret 2017, arXiv:1706.00043"
    constraints: ClassVar[str] = "a mean loss >= 0 of torch.nn.functional, or sample_loss=; a batch of several samples"
    survey: ClassVar[Survey | None] = Survey("loss-biased importance sampling", zhuang="2.2", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"presample": Uniform(1.5, 5.0), "k": Choice((0.0, 0.5, 1.0)), "start": Choice((0.0, 0.3))}, needs_samples
    )
    control: ClassVar[Control] = Control("a random choice of as many samples, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = {**others("LossBiasedSampling"), "SAF": _ONE_LOSS, "MESA": _ONE_LOSS}

    def __init__(
        self,
        presample: float = 3.0,
        *,
        k: float = 0.5,
        start: float = 0.0,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if not 1 < presample < math.inf:
            raise ValueError(
                f"LossBiasedSampling({presample=}): expected a finite number > 1, how many samples are scored for each that is"
                " drawn."
            )
        if not 0 <= k <= 1:
            raise ValueError(
                f"LossBiasedSampling({k=}): expected a number in [0, 1], the exponent of the weights. 1 is unbiased, 0.5 the"
                " paper's."
            )
        if not 0 <= start <= 1:
            raise ValueError(
                f"LossBiasedSampling({start=}): expected a share of the budget in [0, 1], from which on it draws. 1 is plain"
                " training."
            )
        check_sample_loss("LossBiasedSampling", sample_loss)
        self.presample, self.k, self.start = presample, k, start
        self.sample_loss = sample_loss
        self._reset()

    @property
    @override
    def neutral(self) -> bool:
        return self.start == 1

    @override
    def check(self, session: Session) -> None:
        if self.start > 0 and not session.progress.limits():
            raise ValueError(
                f"LossBiasedSampling(start={self.start}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None),"
                " so how far the run is cannot be told. Set one of them, or start=0."
            )

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
