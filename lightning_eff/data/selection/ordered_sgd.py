"""Ordered SGD: train on the samples of largest loss of each batch (Kawaguchi & Lu 2020, arXiv:1907.04371)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import comb
from typing import Any, ClassVar, Literal, NoReturn

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scores, agree
from lightning_eff._core.losses import LossNotVisible
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Around, Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._accuracy import CountRight
from lightning_eff.data.selection._choosing import (
    Choosing,
    check_keep,
    check_sample_loss,
    largest,
    others,
    random_subset,
)

#: The paper's q/s, by the least training accuracy from which it holds.
BY_ACCURACY = ((0.0, 1.0), (0.8, 1 / 2), (0.9, 1 / 4), (0.95, 1 / 8), (0.995, 1 / 16))


def order_weights(n: int, s: int, q: int) -> list[float]:
    """``gamma_j``, how often the sample of the j-th largest of ``n`` losses is among the ``q`` largest of ``s`` drawn.

    ``gamma_j = sum_{l<q} C(j-1, l) C(n-j, s-l-1) / C(n, s)`` for ``j = 1 ... n``; they sum to ``q``. The update is on
    average over batches of ``s`` samples the gradient of ``(1/q) sum_j gamma_j L_(j)``.
    """
    every = comb(n, s)
    return [sum(comb(j - 1, k) * comb(n - j, s - k - 1) for k in range(q)) / every for j in range(1, n + 1)]


def share_at(accuracy: float) -> float:
    """The paper's q/s at a training accuracy in [0, 1]: 1 below 0.8, then 1/2, 1/4 from 0.9, 1/8 from 0.95, 1/16 from 0.995."""
    return [share for least, share in BY_ACCURACY if accuracy >= least][-1]


def _random_subset(technique: "OrderedSGD") -> Mapping[str, Callback]:
    """As many samples of each batch at random; over a run whose share changes, as many as on average."""
    if technique.stages is None:
        return {}
    ends = [*(u for u, _ in technique.stages[1:]), 1.0]
    mean = sum((end - u) * keep for (u, keep), end in zip(technique.stages, ends, strict=True))
    return random_subset(mean)


class OrderedSGD(Choosing):
    """Train on the ``q = round(keep * s)`` samples of largest loss of each batch of ``s``, at least 1.

    A forward-only pass finds each sample's mean loss; on the q largest the user's own ``training_step`` runs, their mean loss
    not reweighted. So what is minimised is not the mean loss but ``(1/q) sum_j gamma_j L_(j)`` of the losses in descending
    order, which counts large ones more. A wrong label has a large loss, too: labels should be right.

    With ``keep="accuracy"``, as in the paper, all samples are trained on until the last epoch's training accuracy is 80 %,
    and then a half, a quarter from 90 % on, an eighth from 95 %, and a sixteenth from 99.5 %. The accuracy is counted in the
    loss calls on classes, as the epoch is trained on, dropout included, of the whole batches and of all ranks. While all are
    trained on, it is read off the training pass itself, which costs no pass; the run's first batch alone is looked at before.

    The loss is seen through the loss functions of ``torch.nn.functional`` (and so ``torch.nn``'s modules):
    ``training_step`` must return the sum of their mean-reduced values, whose rows lie sample by sample; the first batch
    is checked for it. Any other loss needs ``sample_loss``. Under accumulation each micro-batch is chosen from by itself,
    under DDP each rank's.

    Logged: ``active``, whether the last step chose, ``fraction``, the share of its batch that it trained on, and with
    "accuracy" the last whole epoch's ``accuracy``.

    Args:
        keep: ``q/s``, the share of each batch that is trained on: a number in (0, 1], of which 1 is plain training; stages
            ``[(u, keep), ...]`` by the used share ``u`` of the budget, the first at 0; or "accuracy", the paper's schedule.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,). It is used to choose alone; ``training_step`` is what trains.

    Raises:
        ValueError: for other values; with several stages, where the run has no budget; at the first step, on all ranks,
            if the loss cannot be seen by sample, a batch holds one sample only or, with "accuracy", no loss call on classes is
            seen; at any step, if a loss is nan or infinite.

    Sources:
        Kawaguchi & Lu 2020, arXiv:1907.04371.
    """

    saves: ClassVar[str] = "backward passes: the samples of largest loss of each batch are trained on"
    paper: ClassVar[str] = "Kawaguchi & Lu 2020, arXiv:1907.04371"
    survey: ClassVar[Survey | None] = Survey("ordered SGD", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"keep": Choice(("accuracy", 0.25, 0.5))}, needs_samples)
    control: ClassVar[Control] = Control(
        "a random choice of as many samples, without scoring; with keep='accuracy' the baseline for as many seconds",
        _random_subset,
    )
    conflicts: ClassVar[Mapping[str, str]] = others("OrderedSGD")

    def __init__(
        self,
        keep: float | Sequence[tuple[float, float]] | Literal["accuracy"] = "accuracy",
        *,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        check_sample_loss("OrderedSGD", sample_loss)
        self.keep = keep
        self.stages = None if keep == "accuracy" else _stages(keep)
        self.sample_loss = sample_loss
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._accuracy = 0.0
        self._right: int | Tensor = 0
        self._total: int | Tensor = 0
        self._counts = False  # whether a first batch has been seen to have answers that can be counted

    @property
    @override
    def neutral(self) -> bool:
        return self.stages is not None and all(keep == 1 for _, keep in self.stages)

    @override
    def check(self, session: Session) -> None:
        if self.stages is not None and len(self.stages) > 1 and not session.progress.limits():
            raise ValueError(
                f"OrderedSGD(keep={self.keep}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so how far"
                " the run is cannot be told. Set one of them, or one number for keep."
            )

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
                    "OrderedSGD(keep='accuracy'): training_step called none of torch.nn.functional's cross_entropy, nll_loss,"
                    " binary_cross_entropy and binary_cross_entropy_with_logits where it can be seen; expected one, by which"
                    " right answers are counted. Give keep= a number, or stages by the used share of the budget."
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

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), **({"accuracy": self._accuracy} if self.stages is None else {})}

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = (int(self._right), int(self._total))
        return {
            **super().state_dict(),
            "accuracy": self._accuracy,
            "counts": self._counts,
            "answers": [own] if session is None or self.stages is not None else session.gather(own),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._accuracy, self._counts = state_dict["accuracy"], state_dict["counts"]
        rank, answers = 0 if self._session is None else self._session.rank, state_dict["answers"]
        self._right, self._total = answers[rank] if rank < len(answers) else (0, 0)


def _counting(count: CountRight, session: Session) -> Around:
    counted: set[int] = set()

    def around(run: Proceed, batch: Any) -> Any:
        right, total, part = count.right, count.total, session.part[0]
        with count:
            output = run(batch)
        if part in counted:  # another pass on the same samples, as of SAM
            count.right, count.total = right, total
        counted.add(part)
        return output

    return around


def _stages(keep: Any) -> list[tuple[float, float]]:
    """``keep`` as stages ``(u, keep)``.

    Raises:
        ValueError: if it is neither a share, nor stages in order.
    """
    if isinstance(keep, int | float):
        check_keep("OrderedSGD", keep)
        return [(0.0, float(keep))]
    if isinstance(keep, str) or not isinstance(keep, Sequence):
        _refuse(keep)
    stages: list[tuple[Any, Any]] = [tuple(stage) for stage in keep if isinstance(stage, Sequence) and len(stage) == 2]
    if not stages or len(stages) < len(keep):
        _refuse(keep)
    for _, share in stages:
        check_keep("OrderedSGD", share)
    starts = [u for u, _ in stages]
    if starts[0] != 0 or any(not a < b < 1 for a, b in pairwise(starts)):
        _refuse(keep)
    return [(float(u), float(share)) for u, share in stages]


def _refuse(keep: Any) -> NoReturn:
    raise ValueError(
        f"OrderedSGD({keep=}): expected a share in (0, 1], 'accuracy', or stages [(u, keep), ...] whose used shares u of the"
        " budget begin with 0 and rise below 1, such as [(0, 1.0), (0.5, 0.5)]."
    )
