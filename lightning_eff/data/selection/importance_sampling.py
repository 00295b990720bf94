"""Importance sampling by a bound on each sample's gradient norm (Katharopoulos & Fleuret 2018, arXiv:1803.00942)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.selection._random_subset import RandomSubset
from lightning_eff.data.selection._weighing import draw, negative, probabilities, weighing


def variance_reduction(p: Tensor) -> float:
    """``tau >= 1``, the square root of how much drawing with ``p`` lowers the second moment; 1 where all are equal.

    ``1/tau = sqrt(1 - sum_i (p_i - 1/B)^2 / sum_i p_i^2)``, or ``tau = sqrt(B sum_i p_i^2)``, since ``sum_i p_i = 1``.
    """
    return max(1.0, math.sqrt(len(p) * p.double().square().sum().item()))


def default_threshold(size: int, b: int) -> float:
    """``tau_th = (B + 3b) / (3b)``: from there on a step pays for its scoring, a backward pass being two forwards."""
    return (size + 3 * b) / (3 * b)


def _random_subset(technique: "ImportanceSampling") -> dict[str, Callback]:
    """``round(B / presample)`` of each batch at random."""
    keep = 1 / technique.presample
    return {} if technique.neutral or keep == 1 else {f"a random {keep:.0%} of each batch": RandomSubset(keep=keep)}


class ImportanceSampling(Technique):
    """Train on ``b = B / presample`` samples of each batch of ``B``, drawn by how much they would move the weights.

    The loader's batch is the presample. A forward-only pass scores its ``B`` samples; ``b = round(B / presample)`` (at
    least 1) are drawn with replacement with ``p_i = score_i / sum score``, and the loss of each is weighted by ``w_i =
    1 / (B p_i)`` before the mean, so that the step's gradient is, on average over draws, that of the whole batch, with
    padded and ignored tokens too. To train on as many samples as before, give the loader ``presample`` times the batch
    size.

    It switches itself on where that pays: ``tau``, the variance reduction of the scores, is averaged over steps and
    ranks, and samples are drawn once ``tau > threshold``. Until then whole batches are trained on plainly, and ``tau``
    is read off the training pass itself, which costs no pass. A ``threshold`` below 1, the least value of ``tau``, is
    on from the first step. A sample that scores 0 moves no weight and is never drawn; where all score 0, ``p`` is
    uniform. Under accumulation each micro-batch is sampled by itself, under DDP each rank's.

    The loss is seen through the loss functions of ``torch.nn.functional`` (and so ``torch.nn``'s modules):
    ``training_step`` must return the sum of their mean-reduced values, whose rows lie sample by sample; the first batch
    is checked for it. Any other loss needs ``sample_loss``. With it, drawn samples are trained on with the weighted
    mean of what it returns, and ``training_step`` (with its logging) runs in plain steps only, where ``tau`` costs a
    forward pass of its own.

    Args:
        presample: ``B / b``, how many samples are scored for each that is drawn, >= 1. 1 draws as many as there are.
        score: "gradient_bound", the norm of the loss's gradient with respect to the loss function's input (for softmax
            cross-entropy ``||softmax(z) - onehot||``), or "loss" (Katharopoulos & Fleuret 2017, arXiv:1706.00043, here
            with the unbiased weights, its k = 1; its default k = 0.5 dampens them and so favours hard samples).
        threshold: on where ``tau`` exceeds it, >= 0; None is the paper's ``(B + 3b) / (3b)``, 2 where presample is 3.
            ``math.inf`` is plain training.
        smoothing: the paper's ``a_tau``, the weight of the past in ``tau <- a tau + (1 - a) tau_now``, in [0, 1).
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,). With "gradient_bound" it must call a loss function of
            ``torch.nn.functional``, of any reduction, on the logits.

    Raises:
        ValueError: for other values; at the first step, if the loss cannot be seen by sample or a batch holds one
            sample only; at any step, on all ranks, if a score is nan, infinite or negative.
    """

    saves = "backward passes: a third of each batch is trained on, chosen for the least variance"
    paper = "Katharopoulos & Fleuret 2018, arXiv:1803.00942; score='loss': 2017, arXiv:1706.00043"
    constraints = "a mean loss of torch.nn.functional, or sample_loss=; a batch of several samples"
    needs: ClassVar[Need] = Need.STEP
    survey: ClassVar[Survey | None] = Survey("importance sampling", zhuang="2.2", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "presample": Uniform(1.5, 5.0),
            "score": Choice(("gradient_bound", "loss")),
            "threshold": Choice((None, 1.2, 1.5, 2.0)),
        },
        needs_samples,
    )
    control = Control("a random choice of as many samples, from the first step on, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = {"SelectiveBackprop": "both choose the samples"}

    def __init__(
        self,
        presample: float = 3.0,
        *,
        score: Literal["gradient_bound", "loss"] = "gradient_bound",
        threshold: float | None = None,
        smoothing: float = 0.9,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if not 1 <= presample < math.inf:
            raise ValueError(
                f"ImportanceSampling(presample={presample}): expected a finite number >= 1, how many samples are scored"
                " for each that is drawn. 3 is the paper's code's."
            )
        if score not in ("gradient_bound", "loss"):
            raise ValueError(f"ImportanceSampling(score={score!r}): expected 'gradient_bound' or 'loss'.")
        if threshold is not None and not threshold >= 0:
            raise ValueError(
                f"ImportanceSampling(threshold={threshold}): expected a number >= 0 that tau must exceed. None takes"
                " the paper's (B + 3b) / (3b), 0 is always on, math.inf never."
            )
        if not 0 <= smoothing < 1:
            raise ValueError(
                f"ImportanceSampling(smoothing={smoothing}): expected a number in [0, 1), the weight of the past in"
                " tau. 0.9 is the paper's, 0 takes the last step's tau alone."
            )
        if sample_loss is not None and not callable(sample_loss):
            raise ValueError(
                f"ImportanceSampling(sample_loss={sample_loss!r}): expected a function of (module, batch) that returns"
                " the losses of the batch's samples, or None."
            )
        self.presample = presample
        self.score = score
        self.threshold = threshold
        self.smoothing = smoothing
        self.sample_loss = sample_loss
        self._reset()

    def _reset(self) -> None:
        self._scorer = Scorer("ImportanceSampling", self.sample_loss, bounds=self.score == "gradient_bound")
        self._tau = 0.0
        self._on = self.threshold is not None and self.threshold < 1
        self._active, self._fraction = False, 1.0
        self._steps = {"on": 0, "off": 0}
        self._samples = {"seen": 0, "trained": 0}

    @property
    @override
    def neutral(self) -> bool:
        return self.threshold == math.inf

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.CHOOSE, self._link)

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
        self._fraction = trained / size
        self._steps["on" if self._active else "off"] += 1
        self._samples["seen"] += size
        self._samples["trained"] += trained
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
        """Take the scores into ``tau`` and the switch, alike on all ranks; returns this rank's ``p``, if it has one."""
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
    def state_dict(self) -> dict[str, Any]:
        return {
            "tau": self._tau,
            "on": self._on,
            "active": self._active,
            "fraction": self._fraction,
            "steps": dict(self._steps),
            "samples": dict(self._samples),
            "checked": self._scorer.checked,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tau, self._on = state_dict["tau"], state_dict["on"]
        self._active, self._fraction = state_dict["active"], state_dict["fraction"]
        self._steps, self._samples = dict(state_dict["steps"]), dict(state_dict["samples"])
        self._scorer.checked = state_dict["checked"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"tau": self._tau, "active": int(self._active), "fraction": self._fraction}

    @override
    def summary(self) -> str:
        steps, samples = self._steps, self._samples
        return (
            f"drew samples in {steps['on']:,} of {sum(steps.values()):,} steps, trained on {samples['trained']:,} of"
            f" {samples['seen']:,} samples, tau {self._tau:.2f} at the end"
        )
