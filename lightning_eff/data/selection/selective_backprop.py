"""Selective-Backprop: train on the samples of each batch with a high loss (Jiang et al. 2019)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._counting import CountsSamples, Keep, check_budget, check_range
from lightning_eff.data.selection._random_subset import RandomSubset


def keep_probabilities(losses: Tensor, history: Tensor, *, beta: float) -> Tensor:
    """Compute ``P(l) = CDF(l)^beta``, where ``CDF(l)`` is the fraction of ``history`` that is at most ``l``.

    Args:
        losses: shape (B,).
        history: recent losses, shape (R,), in any order.
        beta: >= 0. If ``losses`` are distributed like ``history``, the mean of ``P`` is ``1 / (1 + beta)``.

    Returns:
        Shape (B,), float64.
    """
    at_most = torch.searchsorted(history.double().sort().values, losses.double(), right=True)
    return (at_most.double() / len(history)) ** beta


def choose(weights: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Draw exactly ``k`` indices without replacement, with probabilities proportional to ``weights``.

    These are the ``k`` smallest values of ``E_i / weight_i``, with ``E_i`` exponential. An index of weight 0 is drawn only if
    too few others are left.

    Args:
        weights: shape (B,), >= 0.
        k: in [1, B].
        generator: on the CPU.

    Returns:
        The indices in ascending order, shape (k,), long.
    """
    e = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=generator)
    return (e / weights.double()).argsort(stable=True)[:k].sort().values


def _random_subset(technique: "SelectiveBackprop") -> dict[str, Callback]:
    """Draw as many samples of each batch at random, in the same steps."""
    if technique.neutral:
        return {}
    when = {"start": technique.start, "end": technique.end, "interval": technique.interval}
    return {f"a random {technique.keep:.0%} of each batch": RandomSubset(keep=technique.keep, **when)}


class SelectiveBackprop(CountsSamples):
    """Train on the samples of each batch with a high loss, compared with recent losses.

    A forward pass without gradients computes the loss of each of the ``B`` samples. ``round(keep * B)`` of them (at least
    one) are drawn without replacement, with weights ``CDF(loss)^beta``. The CDF is over the last ``history`` losses of all
    ranks, this batch's included. The module's own ``training_step`` then runs on these samples. Its mean loss is not
    reweighted, so the gradient is biased towards hard samples, as in the paper.

    Use it where backward passes dominate and many samples are already learned. A wrong label is a hard sample too, so avoid
    it on noisy labels. Each step in which it acts costs one extra forward pass and saves ``1 - keep`` of the training step.

    It acts in every ``interval``-th optimizer step while the used fraction of the budget is in ``[start, end)``. Other
    steps are plain, cost nothing and leave the history unchanged. ``interval=2`` corresponds to ``interrupt=2`` in
    Composer, which acts from 0.5 to 0.9 of the run. Micro-batches of an accumulation window and ranks are handled
    separately.

    ``training_step`` must return a sum of mean-reduced losses from ``torch.nn.functional`` (or ``torch.nn``), with one row
    or one group of consecutive rows per sample. The first batch is checked. For any other loss, give ``sample_loss``.

    Args:
        keep: the fraction of each batch to train on. 1 is plain training without the extra pass.
        beta: the selectivity. 1 and 2 are the paper's, 0 draws uniformly.
        start: the fraction of the budget at which it begins to act.
        end: the fraction of the budget at which it stops.
        interval: the number of optimizer steps from one selection to the next.
        history: the number of recent losses in the CDF.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,). It is used only to choose
            samples.

    Raises:
        ValueError: for a value out of range. At setup, if ``start`` or ``end`` is set and the run has no budget. At the
            first step, if the loss of a sample cannot be seen or a batch has one sample. At any step, on all ranks, if a
            loss is NaN or infinite.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SelectiveBackprop(keep=0.5, start=0.5, end=0.9)])

    References:
        Jiang et al. 2019, "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
    """

    saves = "backward passes: only the hard samples of each batch are trained on"
    paper = "Jiang et al. 2019, arXiv:1910.00762"
    constraints = "needs a mean loss of torch.nn.functional, or sample_loss=, and batches of several samples"
    needs: ClassVar[Need] = Need.STEP
    search_space = SearchSpace(
        {
            "keep": Uniform(0.3, 0.8),
            "start": Choice((0.0, 0.25, 0.5)),
            "end": Choice((0.8, 0.9, 1.0)),
            "interval": Choice((1, 2, 3)),
        },
        needs_samples,
    )
    control = Control("as many samples drawn at random in the same steps, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = {"ImportanceSampling": "both choose the samples"}
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 1.0}
    checkpointed = ("_losses", "_scorer.checked")
    stage = Stage.CHOOSE

    def __init__(
        self,
        keep: Keep = 0.5,
        *,
        beta: Annotated[float, Number(at_least=0)] = 1.0,
        start: Annotated[float, Fraction(below=1)] = 0.0,
        end: Annotated[float, Fraction(above=0)] = 1.0,
        interval: Annotated[int, Count()] = 1,
        history: Annotated[int, Count()] = 1024,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        check_range("SelectiveBackprop", start, end)
        self.keep = keep
        self.beta = beta
        self.start = start
        self.end = end
        self.interval = interval
        self.history = history
        self.sample_loss = sample_loss

    @override
    def _reset(self) -> None:
        super()._reset()
        self._scorer = Scorer("SelectiveBackprop", self.sample_loss, bounds=False)
        self._losses = torch.empty(0, dtype=torch.float64)

    @override
    def check(self, session: Session) -> None:
        if self.start > 0 or self.end < 1:
            setting = f"SelectiveBackprop(start={self.start}, end={self.end})"
            check_budget(session, setting, "use start=0 and end=1")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        session, size = self.session, num_samples(batch)
        self._active = self.start <= session.progress.u < self.end and step.global_step % self.interval == 0
        trained = size
        if self._active:
            self._scorer.check_first(session, step, batch, size)
            scores = self._scorer.score(step, batch, size)
            ranks = agree(session, scores.problem, scores.means.tolist())
            new = torch.tensor([loss for losses in ranks for loss in losses], dtype=torch.float64)
            self._losses = torch.cat([self._losses, new])[-self.history :]
            if len(scores.means):  # else training_step skips this batch
                trained = max(1, round(self.keep * size))
                p = keep_probabilities(scores.means, self._losses, beta=self.beta)
                key = ("SelectiveBackprop", step.global_step, step.batch_idx, session.rank)
                batch = step.pick(batch, choose(p, trained, session.generator(*key)), size)
        elif session.progress.u < self.end:
            self._scorer.check_ahead(session, step, batch, size)
        self.count(size, trained)
        return proceed(batch)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "losses": self._losses.clone()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._losses = self._losses.cpu().clone()[-self.history :]
