"""Importance sampling with a bound on each sample's gradient norm (Katharopoulos & Fleuret 2018, arXiv:1803.00942)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform, needs_samples
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._counting import CountsSamples
from lightning_eff.data.selection._random_subset import RandomSubset
from lightning_eff.data.selection._weighing import draw, negative, probabilities, weighing


def variance_reduction(p: Tensor) -> float:
    """Compute ``tau >= 1``, the square root of the factor by which drawing with ``p`` reduces the second moment.

    ``1/tau = sqrt(1 - sum_i (p_i - 1/B)^2 / sum_i p_i^2)``, which equals ``tau = sqrt(B sum_i p_i^2)`` since ``sum_i p_i = 1``.
    It is 1 if all probabilities are equal.
    """
    return max(1.0, math.sqrt(len(p) * p.double().square().sum().item()))


def default_threshold(size: int, b: int) -> float:
    """Compute ``tau_th = (B + 3b) / (3b)``, above which drawing pays for scoring if a backward pass costs two forwards."""
    return (size + 3 * b) / (3 * b)


def _random_subset(technique: "ImportanceSampling") -> dict[str, Callback]:
    """Draw ``round(B / presample)`` samples of each batch at random."""
    keep = 1 / technique.presample
    return {} if technique.neutral or keep == 1 else {f"a random {keep:.0%} of each batch": RandomSubset(keep=keep)}


@dataclass(frozen=True, repr=False)
class _Threshold(Number):
    """A number >= 0, or infinity."""

    low = 0

    @property
    @override
    def expected(self) -> str:
        return "a number >= 0 or math.inf"

    @override
    def __call__(self, value: Any) -> float:
        return value if isinstance(value, float) and value == math.inf else super().__call__(value)


class ImportanceSampling(CountsSamples):
    """Train on the samples of each batch that change the weights most, and reweight them to keep the gradient unbiased.

    The loader's batch of ``B`` samples is the presample. A forward pass without gradients scores it. ``b = round(B /
    presample)`` samples (at least one) are drawn with replacement, with ``p_i = score_i / sum score``. The loss of each is
    weighted by ``w_i = 1 / (B p_i)`` before the mean, so the expected gradient of the step is that of the whole batch, also
    with padded and ignored tokens. To train on as many samples per step as before, multiply the loader's batch size by
    ``presample``.

    It switches itself on when it pays. ``tau`` is the variance reduction that the scores promise, averaged over steps and
    ranks. Samples are drawn once ``tau > threshold``. Until then it trains on whole batches and reads ``tau`` off the training
    pass, which costs no extra pass. ``tau`` is at least 1, so a ``threshold`` below 1 draws from the first step on. Use it
    where the backward pass dominates and gradient norms differ a lot between samples.

    A sample with score 0 is never drawn. If all scores are 0, draws are uniform. Micro-batches of an accumulation window and
    ranks are handled separately.

    ``training_step`` must return a sum of mean-reduced losses from ``torch.nn.functional`` (or ``torch.nn``), with one row
    or one group of consecutive rows per sample. The first batch is checked. For any other loss, give ``sample_loss``. The
    drawn samples are then trained on with the weighted mean of its values. ``training_step`` (with its logging) runs only in
    plain steps, where ``tau`` costs an extra forward pass.

    Args:
        presample: the number of samples to score for each sample to draw, ``B / b``. 1 draws ``B`` samples.
        score: the estimate of each sample's gradient norm. "gradient_bound" is the norm of the loss's gradient with respect to
            the input of the loss function, ``||softmax(z) - onehot||`` for cross-entropy. "loss" is the loss itself, with
            unbiased weights.
        threshold: the value of ``tau`` above which it draws samples. None is the paper's ``(B + 3b) / (3b)``, which is 2 for
            ``presample=3``. ``math.inf`` is plain training.
        smoothing: the weight of earlier steps in the running mean of ``tau``. 0 uses only the last step.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,). With "gradient_bound" it must
            call a loss function of ``torch.nn.functional`` on the logits, with any reduction.

    Raises:
        ValueError: for a value out of range. At the first step, if the loss of a sample cannot be seen or a batch has one
            sample. At any step, on all ranks, if a score is NaN, infinite or negative.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ImportanceSampling(presample=3)])

    References:
        Katharopoulos and Fleuret 2018, "Not All Samples Are Created Equal: Deep Learning with Importance Sampling",
        arXiv:1803.00942. ``score="loss"``: Katharopoulos and Fleuret 2017, "Biased Importance Sampling for Deep Neural Network
        Training", arXiv:1706.00043, with ``k = 1``. :class:`LossBiasedSampling` has the paper's ``k = 0.5``.
    """

    saves = "backward passes: a third of each batch is trained on, drawn for the least variance"
    paper = "Katharopoulos & Fleuret 2018, arXiv:1803.00942; score='loss': 2017, arXiv:1706.00043"
    constraints = "needs a mean loss of torch.nn.functional, or sample_loss=, and batches of several samples"
    did = "drew"
    needs: ClassVar[Need] = Need.STEP
    search_space = SearchSpace(
        {
            "presample": Uniform(1.5, 5.0),
            "score": Choice(("gradient_bound", "loss")),
            "threshold": Choice((None, 1.2, 1.5, 2.0)),
        },
        needs_samples,
    )
    control = Control("as many samples drawn at random from the first step on, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = {"SelectiveBackprop": "both choose the samples"}
    neutral_at: ClassVar[Mapping[str, Any]] = {"threshold": math.inf}
    checkpointed = ("_tau", "_on", "_scorer.checked")
    stage = Stage.CHOOSE

    def __init__(
        self,
        presample: Annotated[float, Number(at_least=1)] = 3.0,
        *,
        score: Literal["gradient_bound", "loss"] = "gradient_bound",
        threshold: Annotated[float | None, _Threshold(hint="0 always draws, math.inf never does.")] = None,
        smoothing: Annotated[float, Fraction(below=1)] = 0.9,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        self.presample = presample
        self.score = score
        self.threshold = threshold
        self.smoothing = smoothing
        self.sample_loss = sample_loss

    @override
    def _reset(self) -> None:
        super()._reset()
        self._scorer = Scorer("ImportanceSampling", self.sample_loss, bounds=self.score == "gradient_bound")
        self._tau = 0.0
        self._on = self.threshold is not None and self.threshold < 1

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        size = num_samples(batch)
        b = max(1, round(size / self.presample))
        self._scorer.check_first(self.session, step, batch, size)
        self._active = self._on
        if not self._active:
            output = self._train_on_all(step, batch, proceed, size, b)
            trained = size
        else:
            scores = self._scorer.score(step, batch, size)
            p = self._update(scores, size, b)
            if p is None:
                output, trained = proceed(batch), size
            else:
                key = ("ImportanceSampling", step.global_step, step.batch_idx, self.session.rank)
                index = draw(p, b, self.session.generator(*key))
                w = 1 / (size * p[index])
                step.around = weighing(self.session, w.float(), size, scores, self.sample_loss)
                output, trained = proceed(step.pick(batch, index, size)), b
        self.count(size, trained)
        return output

    def _train_on_all(self, step: Step, batch: Any, proceed: Proceed, size: int, b: int) -> Any:
        if self.sample_loss is None and not self.session.divided:
            step.around, read = self._scorer.reading(step, size)
            output = proceed(batch)
            self._update(read(), size, b)
            return output
        self._update(self._scorer.score(step, batch, size), size, b)
        return proceed(batch)

    def _update(self, scores: Scores, size: int, b: int) -> Tensor | None:
        """Update ``tau`` and the switch from the scores, the same on all ranks, and return this rank's ``p`` if it has one."""
        problem, p, tau = scores.problem, None, None
        if problem is None and len(scores.losses):
            g = scores.losses if scores.bounds is None else scores.bounds
            problem = negative("ImportanceSampling(score='loss')", g, "Use score='gradient_bound'.")
            if problem is None:
                p = probabilities(g)
                tau = variance_reduction(p)
        ranks = agree(self.session, problem, (tau, default_threshold(size, b)))
        taus = [tau for tau, _ in ranks if tau is not None]
        if taus:
            # tau <- a tau + (1 - a) tau_now
            self._tau = self.smoothing * self._tau + (1 - self.smoothing) * sum(taus) / len(taus)
            threshold = max(threshold for _, threshold in ranks) if self.threshold is None else self.threshold
            self._on = self._tau > threshold or threshold < 1
        return p

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"tau": self._tau, **super().report()}

    @override
    def summary(self) -> str:
        return f"{super().summary()}, tau {self._tau:.2f} at the end"
