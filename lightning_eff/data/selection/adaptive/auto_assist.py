"""AutoAssist: a small model predicts which samples are hard; few of the others are trained on (Zhang et al. 2019)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._arguments.objects import Instance
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import others
from lightning_eff.data.selection._counting import CountsSamples, check_budget
from lightning_eff.data.selection._random_subset import RandomSubset
from lightning_eff.data.selection.adaptive._assistant import Assistant


def pick_probabilities(p: Tensor, *, gamma: float) -> Tensor:
    """Compute each sample's probability of being trained on, ``gamma + (1 - gamma) p_i``, shape (B,), float64.

    Args:
        p: the assistant's probabilities that the samples are hard, shape (B,).
        gamma: the probability of a sample that is certainly easy, in [0, 1].
    """
    return gamma + (1 - gamma) * p.double()


def pick(q: Tensor, generator: torch.Generator, *, least: int = 2) -> Tensor:
    """Pick each index independently with its probability ``q_i``, but at least ``least`` of them.

    These are all indices with ``u_i / q_i < 1``, or the ``least`` smallest values, with ``u_i`` uniform.

    Args:
        q: chances, shape (B,).
        generator: on the CPU.
        least: how many at least; of batches that have so many.

    Returns:
        The indices, long, ascending.
    """
    ratio = torch.rand(len(q), dtype=torch.float64, generator=generator) / q.double()
    picked = max(int((ratio < 1).sum()), min(least, len(q)))
    return ratio.argsort(stable=True)[:picked].sort().values


def _random_subset(technique: "AutoAssist") -> Mapping[str, Callback]:
    if technique.neutral:
        return {}
    keep = technique.gamma + (1 - technique.gamma) / 2
    return {f"a random {keep:.0%} of each batch": RandomSubset(keep=keep, start=technique.start)}


class AutoAssist(CountsSamples):
    """Train on the samples of each batch that a small model predicts to be hard, and on a fraction of the others.

    The assistant is a model far smaller than the network. Before a step it predicts the probability ``p_i`` that the loss of a
    sample is above the mean of recent losses. The sample is trained on with probability ``gamma + (1 - gamma) p_i``, each
    independently, and at least two are. After the step the assistant learns from the losses of the samples that were trained
    on: one step of logistic regression towards ``z_i = 1[l_i > T]``, with ``T`` a moving mean of the losses.

    Use it where a scoring pass of the network costs too much: there is none, and the assistant costs next to nothing. The
    number of samples per step varies. The mean loss is not reweighted, as in the paper, so the gradient is biased towards
    samples that are predicted to be hard. A wrong label is a hard sample too, so avoid it on noisy labels.

    The default assistant is a logistic regression on all tensors of a sample. Integers, including labels, are a bag of hashed
    tokens. Images and other floating-point values are averaged to at most 256 numbers. All ranks share one assistant, which
    learns from the samples of all of them. Micro-batches of an accumulation window and ranks are handled separately. In
    the paper the assistant runs on the CPU in parallel; here it runs between steps, on the network's device.

    ``training_step`` must return a sum of mean-reduced losses from ``torch.nn.functional`` (or ``torch.nn``), with one row
    or one group of consecutive rows per sample. The first batch is checked. For any other loss, give ``sample_loss``, which
    costs an extra forward pass on the picked samples.

    It logs ``active`` (whether the last step picked samples), ``fraction`` (the fraction of the batch that was used),
    ``threshold`` (the moving mean of the losses) and ``accuracy`` (the moving fraction of correct predictions).

    Args:
        gamma: the probability of training on a sample that is certainly easy. 0.3 is the authors', 1 is plain training.
        assistant: a module that takes a batch, as ``training_step`` does, and returns one logit per sample, shape (B,). It is
            copied when a run begins. None takes the logistic regression.
        num_buckets: the number of weights of the logistic regression.
        lr: the learning rate of the assistant's AdaGrad.
        smoothing: the weight of earlier steps in the moving means.
        start: the fraction of the budget at which it begins to pick. The assistant learns from the first step on. 1 is plain
            training.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,). Only the assistant learns from
            it.

    Raises:
        ValueError: for a value out of range. At setup, if ``start`` is set and the run has no budget. At the first step, on all
            ranks, if the loss of a sample cannot be seen or a batch has one sample. At any step, if a loss is NaN or infinite,
            or the assistant does not return one logit per sample.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[AutoAssist(gamma=0.3, start=0.1)])

    References:
        Zhang, Yu and Dhillon 2019, "AutoAssist: A Framework to Accelerate Training of Deep Neural Networks", NeurIPS,
        arXiv:1905.03381, for the probabilities and the assistant. ``gamma`` and the mean as a threshold are from the authors'
        code. Batches that shrink, hashed features and AdaGrad are this package's.
    """

    saves = "forward and backward passes of samples that a small model predicts to be easy"
    paper = "Zhang et al. 2019, arXiv:1905.03381"
    constraints = "needs a mean loss of torch.nn.functional, or sample_loss=, and batches of several samples"
    did: ClassVar[str] = "picked"
    needs: ClassVar[Need] = Need.STEP
    search_space = SearchSpace({"gamma": Choice((0.2, 0.3, 0.5)), "start": Choice((0.0, 0.1, 0.3))}, needs_samples)
    control = Control(
        "as many samples drawn at random as an untrained assistant picks, without an assistant", _random_subset
    )
    conflicts: ClassVar[Mapping[str, str]] = others("AutoAssist")
    neutral_at: ClassVar[Mapping[str, Any]] = {"gamma": 1, "start": 1}
    checkpointed = ("_scorer.checked",)

    def __init__(
        self,
        gamma: Annotated[float, Fraction()] = 0.3,
        *,
        assistant: Annotated[nn.Module, Instance("a module", (nn.Module,), hint="None takes a logistic regression.")]
        | None = None,
        num_buckets: Annotated[int, Count()] = 4096,
        lr: Annotated[float, Number(above=0)] = 0.1,
        smoothing: Annotated[float, Fraction(below=1)] = 0.95,
        start: Annotated[float, Fraction()] = 0.0,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if assistant is not None and not any(p.requires_grad for p in assistant.parameters()):
            raise ValueError(
                f"AutoAssist(assistant={type(assistant).__name__}(...)): the module has no trainable parameters. Create its"
                " layers in __init__."
            )
        self.gamma, self.assistant, self.num_buckets, self.lr = gamma, assistant, num_buckets, lr
        self.smoothing, self.start, self.sample_loss = smoothing, start, sample_loss

    @override
    def _reset(self) -> None:
        super()._reset()
        self._scorer = Scorer("AutoAssist", self.sample_loss, bounds=False)
        self._own: Assistant | None = None
        self._seen: tuple[int, Any, Tensor, list[Any]] | None = None  # of a micro-batch, until it ends

    @override
    def check(self, session: Session) -> None:
        if self.start > 0:
            check_budget(session, f"AutoAssist(start={self.start})", "use start=0")

    @override
    def attach(self, session: Session) -> None:
        strategy = session.trainer.strategy
        self._own = Assistant(
            self.assistant,
            num_buckets=self.num_buckets,
            lr=self.lr,
            smoothing=self.smoothing,
            seed=session.seed,
            device=strategy.root_device,
        )
        if self.assistant is not None and session.replicas.count > 1:  # each rank may have drawn other weights
            self._own.load_state_dict(session.gather(self._own.state_dict())[0])
        session.chain.add(Stage.CHOOSE, self._link)

    @override
    def detach(self, session: Session) -> None:
        self._seen = None

    # -- the step

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        session, size, own = self.session, num_samples(batch), self._own
        assert own is not None
        self._scorer.check_ahead(session, step, batch, size)
        own.seed = session.seed
        self._active = session.progress.u >= self.start
        trained = size
        if self._active:
            p = own.probabilities(batch, step.global_step, step.batch_idx, "tell")
            generator = session.generator("AutoAssist", step.global_step, step.batch_idx, session.rank)
            index = pick(pick_probabilities(p, gamma=self.gamma), generator)
            trained = len(index)
            if trained < size:
                batch = step.pick(batch, index, size)
        read = None
        if self.sample_loss is None and not session.divided:
            step.around, read = self._scorer.reading(step, trained)
        output = proceed(batch)
        if read is None and output is not None:
            scores = self._scorer.score(step, batch, trained)
        else:
            scores = Scores() if read is None else read()
        losses = scores.means
        told = agree(session, scores.problem, (float(losses.sum()), len(losses)))
        self._seen = step.global_step, batch, losses, told
        self.count(size, trained)
        return output

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        own, seen = self._own, self._seen
        if own is None or seen is None:
            return
        self._seen = None
        global_step, batch, losses, told = seen
        count = sum(number for _, number in told)
        if not count:  # training_step skipped this batch
            return
        own.see(sum(total for total, _ in told), count)
        device = session.trainer.strategy.root_device
        parts: tuple[list[Tensor], int] = ([], 0)
        if len(losses):
            parts = own.gradients(batch, losses.to(device).float(), count, global_step, batch_idx, "learn")
        every = session.gather((*parts, own.buffers()))
        own.step([gradients for gradients, _, _ in every if gradients], sum(right for _, right, _ in every), count)
        if session.replicas.count > 1:
            own.set_buffers([buffers for _, _, buffers in every])

    # -- report and state

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "assistant": None if self._own is None else self._own.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._own is not None and state_dict["assistant"] is not None:
            self._own.load_state_dict(state_dict["assistant"])

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        own = self._own
        learned = (
            {} if own is None or math.isnan(own.accuracy) else {"threshold": own.threshold, "accuracy": own.accuracy}
        )
        return {**super().report(), **learned}
