"""Selective-Backprop: train on the samples of each batch that are hard by recent standards (Jiang et al. 2019)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.selection._random_subset import RandomSubset


def keep_probabilities(losses: Tensor, history: Tensor, *, beta: float) -> Tensor:
    """``P(l) = CDF(l)^beta`` with ``CDF(l)`` the share of ``history`` that is at most ``l``; shape (B,), float64.

    Args:
        losses: shape (B,).
        history: recent losses, shape (R,), in any order.
        beta: >= 0; over losses like those of the history the mean of ``P`` is ``1 / (1 + beta)``.
    """
    at_most = torch.searchsorted(history.double().sort().values, losses.double(), right=True)
    return (at_most.double() / len(history)) ** beta


def choose(weights: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Exactly ``k`` of the indices of ``weights``, drawn without replacement one by one with chances as their weights.

    That is, the k least of ``E_i / weight_i`` with ``E_i`` exponential. An index of weight 0 is chosen only where too
    few others are left.

    Args:
        weights: shape (B,), >= 0.
        k: in [1, B].
        generator: on the CPU.

    Returns:
        The indices, long, shape (k,), ascending.
    """
    e = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=generator)
    return (e / weights.double()).argsort(stable=True)[:k].sort().values


def _random_subset(technique: "SelectiveBackprop") -> dict[str, Callback]:
    """As many samples of each batch at random, in the steps in which it would choose."""
    if technique.neutral:
        return {}
    when = {"start": technique.start, "end": technique.end, "interval": technique.interval}
    return {f"a random {technique.keep:.0%} of each batch": RandomSubset(keep=technique.keep, **when)}


class SelectiveBackprop(Technique):
    """Train on ``round(keep * B)`` samples of each batch of ``B``, drawn by how large their loss is among recent ones.

    A forward-only pass finds each sample's mean loss; exactly ``round(keep * B)`` samples (at least 1) are drawn
    without replacement with chances ``CDF(loss)^beta``, where the CDF is that of the last ``history`` losses of all
    ranks, this batch's among them; on these the user's own ``training_step`` runs, its mean loss not reweighted. So the
    gradient is biased towards hard samples, as in the paper, and a wrong label is a hard sample too.

    It acts while the used share ``u`` of the budget is in ``[start, end)``, in optimizer steps whose number, counted
    from the run's first as 0, ``interval`` divides; other steps are plain, cost no pass and leave the history as it is. So
    ``interval=2`` alternates, as ``interrupt=2`` does in Composer, which acts from 0.5 to 0.9 of the run. The run's first
    step looks at the loss even where it is a plain one. Under accumulation each micro-batch is chosen from by itself, under
    DDP each rank's.

    The loss is seen through the loss functions of ``torch.nn.functional`` (and so ``torch.nn``'s modules):
    ``training_step`` must return the sum of their mean-reduced values, whose rows lie sample by sample; the first batch
    is checked for it. Any other loss needs ``sample_loss``.

    Args:
        keep: the share of each batch that is trained on, in (0, 1]. 1 is plain training and costs no pass.
        beta: the selectivity, >= 0; 0 draws uniformly.
        start: from this share of the budget on, in [0, 1).
        end: up to this share of the budget, in (start, 1].
        interval: every so many optimizer steps, >= 1.
        history: how many of the last losses make the CDF, >= 1.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,). It is used to choose alone; ``training_step`` is what trains.

    Raises:
        ValueError: for other values; where ``start`` or ``end`` counts and the run has no budget; at the first step, if
            the loss cannot be seen by sample or a batch holds one sample only; at any step, on all ranks, if a loss is
            nan or infinite.
    """

    saves = "backward passes: a share of each batch is trained on, the hard samples"
    paper = "Jiang et al. 2019, arXiv:1910.00762"
    constraints = "a mean loss of torch.nn.functional, or sample_loss=; a batch of several samples"
    needs: ClassVar[Need] = Need.STEP
    survey: ClassVar[Survey | None] = Survey("selective backprop", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "keep": Uniform(0.3, 0.8),
            "start": Choice((0.0, 0.25, 0.5)),
            "end": Choice((0.8, 0.9, 1.0)),
            "interval": Choice((1, 2, 3)),
        },
        needs_samples,
    )
    control = Control("a random choice of as many samples in the same steps, without scoring", _random_subset)
    conflicts: ClassVar[Mapping[str, str]] = {"ImportanceSampling": "both choose the samples"}

    def __init__(
        self,
        keep: float = 0.5,
        *,
        beta: float = 1.0,
        start: float = 0.0,
        end: float = 1.0,
        interval: int = 1,
        history: int = 1024,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if not 0 < keep <= 1:
            raise ValueError(
                f"SelectiveBackprop(keep={keep}): expected a number in (0, 1], the share of each batch that is trained"
                " on. 0.5 is half of it, 1 is plain training."
            )
        if not 0 <= beta < float("inf"):
            raise ValueError(
                f"SelectiveBackprop(beta={beta}): expected a finite number >= 0, the power of the CDF. 1 and 2 are the"
                " paper's, 0 draws uniformly."
            )
        if not 0 <= start < end <= 1:
            raise ValueError(
                f"SelectiveBackprop(start={start}, end={end}): expected 0 <= start < end <= 1, shares of the run's"
                " budget between which it acts."
            )
        for name, value in (("interval", interval), ("history", history)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"SelectiveBackprop({name}={value!r}): expected an integer >= 1, a number of"
                    f" {'optimizer steps' if name == 'interval' else 'losses'}."
                )
        if sample_loss is not None and not callable(sample_loss):
            raise ValueError(
                f"SelectiveBackprop(sample_loss={sample_loss!r}): expected a function of (module, batch) that returns"
                " the losses of the batch's samples, or None."
            )
        self.keep = keep
        self.beta = beta
        self.start = start
        self.end = end
        self.interval = interval
        self.history = history
        self.sample_loss = sample_loss
        self._reset()

    def _reset(self) -> None:
        self._scorer = Scorer("SelectiveBackprop", self.sample_loss, bounds=False)
        self._losses = torch.empty(0, dtype=torch.float64)
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
                f"SelectiveBackprop(start={self.start}, end={self.end}): the Trainer has no end (max_steps=-1,"
                " max_epochs=-1, max_time=None), so how far the run is cannot be told. Set one of them, or start=0 and"
                " end=1."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.CHOOSE, self._link)

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
            if len(scores.means):  # else the user's step skips this batch
                trained = max(1, round(self.keep * size))
                p = keep_probabilities(scores.means, self._losses, beta=self.beta)
                key = ("SelectiveBackprop", step.global_step, step.batch_idx, session.rank)
                batch = step.pick(batch, choose(p, trained, session.generator(*key)), size)
        elif session.progress.u < self.end:
            self._scorer.check_ahead(session, step, batch, size)
        self._fraction = trained / size
        self._steps["on" if self._active else "off"] += 1
        self._samples["seen"] += size
        self._samples["trained"] += trained
        return proceed(batch)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": self._losses.clone(),
            "active": self._active,
            "fraction": self._fraction,
            "steps": dict(self._steps),
            "samples": dict(self._samples),
            "checked": self._scorer.checked,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses = state_dict["losses"].cpu().clone()[-self.history :]
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
