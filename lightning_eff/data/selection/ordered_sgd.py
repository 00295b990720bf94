"""Ordered SGD: train on the samples with the largest loss of each batch (Kawaguchi & Lu 2020, arXiv:1907.04371)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Either, Fraction, OneOf
from lightning_eff._core._arguments.stages import Stages
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores, agree
from lightning_eff._core.losses import LossNotVisible
from lightning_eff._core.search_space import Choice, SearchSpace, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Around, Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._accuracy import CountRight
from lightning_eff.data.selection._choosing import Choosing, largest, others, random_subset
from lightning_eff.data.selection._counting import check_budget

_HINT = "For example, give keep=[(0, 1.0), (0.5, 0.5)]."
_KEEP = Either(OneOf("accuracy"), Fraction(above=0), Stages("fraction of the batch", grows=False), hint=_HINT)
#: The paper's q/s by the training accuracy from which it applies.
BY_ACCURACY = ((0.0, 1.0), (0.8, 1 / 2), (0.9, 1 / 4), (0.95, 1 / 8), (0.995, 1 / 16))


def share_at(accuracy: float) -> float:
    """The paper's q/s at a training accuracy in [0, 1]: 1 below 0.8, then 1/2, 1/4 from 0.9, 1/8 from 0.95, 1/16 from 0.995."""
    return [share for least, share in BY_ACCURACY if accuracy >= least][-1]


def _random_subset(technique: "OrderedSGD") -> Mapping[str, Callback]:
    """Draw as many samples of each batch at random, or the average number if the fraction changes over the run."""
    if technique.stages is None:
        return {}
    ends = [*(u for u, _ in technique.stages[1:]), 1.0]
    mean = sum((end - u) * keep for (u, keep), end in zip(technique.stages, ends, strict=True))
    return random_subset(mean)


class OrderedSGD(Choosing):
    """Train on the samples with the largest loss of each batch.

    A forward pass without gradients computes the loss of each of the ``s`` samples of a batch. The module's own
    ``training_step`` then runs on the ``q = round(keep * s)`` samples with the largest loss (at least one). Their mean loss is
    not reweighted, so training minimizes ``(1/q) sum_j gamma_j L_(j)`` over the losses in descending order. The weight
    ``gamma_j`` is the probability that the j-th largest loss is among the ``q`` largest of a batch.

    Use it to spend backward passes on hard samples. Labels should be right, because a wrong label has a large loss too. Each
    step in which it acts costs one extra forward pass and saves ``1 - keep`` of the training step. Micro-batches of an
    accumulation window and ranks are handled separately.

    With ``keep="accuracy"``, as in the paper, the fraction depends on the training accuracy of the last epoch. It is 1 up to
    80 %, then 1/2, 1/4 from 90 %, 1/8 from 95 % and 1/16 from 99.5 %. The accuracy is counted in the classification losses of
    the epoch's training steps (with dropout), over whole batches and all ranks. While all samples are trained on, the training
    pass itself gives the accuracy, so there is no extra pass except for the first batch of the run.

    ``training_step`` must return a sum of mean-reduced losses from ``torch.nn.functional`` (or ``torch.nn``), with one row
    or one group of consecutive rows per sample. The first batch is checked. For any other loss, give ``sample_loss``.

    It logs ``active`` (whether the last step chose samples), ``fraction`` (the fraction of the batch that was used) and, with
    "accuracy", the ``accuracy`` of the last whole epoch.

    Args:
        keep: the fraction ``q/s`` of each batch to train on. It is a number in (0, 1], where 1 is plain training, or
            "accuracy" for the paper's schedule. Stages ``[(u, keep), ...]`` change it at the used fraction ``u`` of the budget,
            starting at 0.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,). It is used only to choose
            samples.

    Raises:
        ValueError: for a value out of range. At setup, if there are several stages and the run has no budget. At the first
            step, on all ranks, if the loss of a sample cannot be seen, a batch has one sample, or "accuracy" finds no
            classification loss. At any step, if a loss is NaN or infinite.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[OrderedSGD("accuracy")])
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[OrderedSGD([(0, 1.0), (0.5, 0.5)])])

    References:
        Kawaguchi and Lu 2020, "Ordered SGD: A New Stochastic Optimization Framework for Empirical Risk Minimization",
        arXiv:1907.04371.
    """

    saves = "backward passes: only the samples with the largest loss of each batch are trained on"
    paper = "Kawaguchi & Lu 2020, arXiv:1907.04371"
    search_space = SearchSpace({"keep": Choice(("accuracy", 0.25, 0.5))}, needs_samples)
    control = Control(
        "as many samples drawn at random, without scoring; for keep='accuracy' the baseline for as many seconds",
        _random_subset,
    )
    conflicts: ClassVar[Mapping[str, str]] = others("OrderedSGD")
    checkpointed = ("_accuracy", "_counts")

    def __init__(
        self,
        keep: Annotated[float | Sequence[tuple[float, float]] | Literal["accuracy"], _KEEP] = "accuracy",
        *,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        self.keep = keep
        self.stages = None if isinstance(keep, str) else [(0.0, keep)] if isinstance(keep, int | float) else [*keep]
        self.sample_loss = sample_loss

    @override
    def _reset(self) -> None:
        super()._reset()
        self._accuracy = 0.0
        self._right: int | Tensor = 0
        self._total: int | Tensor = 0
        self._counts = False  # whether a batch with answers that can be counted has been seen

    @property
    @override
    def neutral(self) -> bool:
        return self.stages is not None and all(keep == 1 for _, keep in self.stages)

    @override
    def check(self, session: Session) -> None:
        if self.stages is not None and len(self.stages) > 1:
            check_budget(session, f"OrderedSGD(keep={self.keep})", "give one number for keep")

    # -- the step

    @override
    def share(self, step: Step) -> float:
        if self.stages is None:
            return share_at(self._accuracy)
        return [keep for u, keep in self.stages if self.session.progress.u >= u][-1]

    @override
    def score(self, step: Step, batch: Any, size: int) -> Scores:
        if self.stages is not None:
            return super().score(step, batch, size)
        count = CountRight()
        with count:
            scores = super().score(step, batch, size)
        self._take(count, skipped=not len(scores.means))
        return scores

    @override
    def plain(self, step: Step, batch: Any, proceed: Proceed, size: int) -> Any:
        if self.stages is not None or self._active:
            return proceed(batch)
        count = CountRight()
        step.around = _counting(count, self.session)
        output = proceed(batch)
        count.right, count.total = self.session.from_loss((count.right, count.total))
        self._take(count, skipped=output is None)
        return output

    @override
    def train(self, step: Step, batch: Any, proceed: Proceed, scores: Scores, size: int, k: int) -> Any:
        return proceed(step.pick(batch, largest(scores.means, k=k), size))

    # -- the accuracy

    def _take(self, count: CountRight, *, skipped: bool) -> None:
        if not self._counts:
            problem = None
            if count.right is None and not skipped:
                problem = LossNotVisible(
                    "OrderedSGD(keep='accuracy'): found no call of torch.nn.functional's cross_entropy, nll_loss,"
                    " binary_cross_entropy or binary_cross_entropy_with_logits in training_step, so the accuracy is unknown."
                    " Give a number, such as keep=0.5, or stages."
                )
            self._counts = all(agree(self.session, problem, not skipped))
        if count.right is not None and count.total is not None:
            self._right = self._right + count.right
            self._total = self._total + count.total

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self.stages is not None or not session.epoch_complete():
            return
        every = session.gather((int(self._right), int(self._total)))
        total = sum(total for _, total in every)
        if total:
            self._accuracy = sum(right for right, _ in every) / total
        self._right = self._total = 0

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), **({"accuracy": self._accuracy} if self.stages is None else {})}

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = (int(self._right), int(self._total))
        answers = [own] if session is None or self.stages is not None else session.gather(own)
        return {**super().state_dict(), "answers": answers}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        rank, answers = 0 if self._session is None else self._session.rank, state_dict["answers"]
        self._right, self._total = answers[rank] if rank < len(answers) else (0, 0)


def _counting(count: CountRight, session: Session) -> Around:
    counted: set[int] = set()

    def around(run: Proceed, batch: Any) -> Any:
        right, total, part = count.right, count.total, session.part[0]
        with count:
            output = run(batch)
        if part in counted:  # another pass on the same samples, as in SAM
            count.right, count.total = right, total
        counted.add(part)
        return output

    return around
