"""AutoAssist: a small assistant says which samples are hard, few others are trained on (Zhang et al. 2019)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer, Scores, agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.selection._choosing import check_sample_loss, others
from lightning_eff.data.selection._random_subset import RandomSubset
from lightning_eff.data.selection.adaptive._assistant import Assistant


def pick_probabilities(p: Tensor, *, gamma: float) -> Tensor:
    """``gamma + (1 - gamma) p_i``, the chance of each sample to be trained on; shape (B,), float64.

    Args:
        p: the assistant's probabilities that the samples are hard, shape (B,).
        gamma: in [0, 1], the chance of a sample that is surely easy.
    """
    return gamma + (1 - gamma) * p.double()


def pick(q: Tensor, generator: torch.Generator, *, least: int = 2) -> Tensor:
    """Each index with its own chance ``q_i``, apart from the others; where too few are, those that came nearest as well.

    That is, all of ``u_i / q_i < 1``, or the ``least`` smallest, with ``u_i`` uniform.

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


class AutoAssist(Technique):
    """Train on those samples of each batch that an assistant finds hard, and on a share ``gamma`` of the others.

    The assistant is a model of its own, far smaller than the network (the paper's boss). Before a step it gives each sample of
    the batch the probability ``p_i`` that its loss lies above the mean of recent losses, and the sample is trained on with the
    chance ``gamma + (1 - gamma) p_i``, apart from the others; at least two are, for the sake of batch norms. After the step the
    assistant learns from the losses of those that were trained on: one step of logistic regression towards ``z_i = 1[l_i >
    T]``, with ``T`` a moving mean of them. So there is no pass of the network that scores, and a step's batch varies in size.

    There is no correction for the bias: the mean loss of the samples picked is not reweighted, as in the paper, so that the
    gradient leans towards samples that are taken to be hard, and a wrong label is a hard sample too. ``gamma=1`` trains on
    everything, which is plain training.

    Without ``assistant=`` it is a logistic regression on all that a batch has of a sample: whole numbers, labels among them,
    as a bag of hashed tokens; images and other floating values averaged to at most 256 numbers. It has ``num_buckets`` weights.
    All ranks have the same assistant, which learns from the samples of all of them; each picks from its own batch. Under
    accumulation each micro-batch is picked from by itself, and taught by itself. In the paper the assistant runs on the CPU
    beside the network; here it runs between the steps, on the network's device.

    The loss is seen through the loss functions of ``torch.nn.functional`` (and so ``torch.nn``'s modules) in the training pass
    itself: ``training_step`` must return the sum of their mean-reduced values, whose rows lie sample by sample; the first
    batch is checked for it. Any other loss needs ``sample_loss``, which costs a forward pass over the samples picked.

    Logged: ``active``, whether the last step picked; ``fraction``, the share of its batch that it trained on; ``threshold``,
    the moving mean of losses; ``accuracy``, the moving share of samples that the assistant told right.

    Args:
        gamma: the chance of a sample that is surely easy, in [0, 1]. 0.3 is the source's; 1 is plain training.
        assistant: a module that takes a batch, as ``training_step`` does, and returns a logit for each of its samples, shape
            (B,). It is copied as a run begins. None takes the logistic regression.
        num_buckets: of the latter, >= 1.
        lr: the rate of the assistant's AdaGrad, > 0.
        smoothing: the weight of the past in the moving means, in [0, 1).
        start: from this share of the budget on it picks, in [0, 1]; before, the assistant only learns. 1 is plain training.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,). The assistant learns from it; ``training_step`` is what trains.

    Raises:
        ValueError: for other values; where ``start`` counts and the run has no budget; at the first step, on all ranks, if the
            loss cannot be seen by sample or a batch holds one sample only; at any step, if a loss is nan or infinite, or the
            assistant returns something else.

    Sources:
        Zhang, Yu & Dhillon 2019, NeurIPS: the chances, and an assistant that learns from observed losses. Their code: gamma,
        and the mean as a threshold. Ours: batches are not filled up, but shrink; hashed features and AdaGrad.
    """

    saves: ClassVar[str] = "forward and backward passes of samples that a small model takes to be learnt"
    paper: ClassVar[str] = "Zhang et al. 2019, arXiv:1905.03381"
    constraints: ClassVar[str] = "a mean loss of torch.nn.functional, or sample_loss=; a batch of several samples"
    needs: ClassVar[Need] = Need.STEP
    survey: ClassVar[Survey | None] = Survey("AutoAssist", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"gamma": Choice((0.2, 0.3, 0.5)), "start": Choice((0.0, 0.1, 0.3))}, needs_samples
    )
    control: ClassVar[Control] = Control(
        "a random choice of as many samples as an assistant that knows nothing picks, without one", _random_subset
    )
    conflicts: ClassVar[Mapping[str, str]] = others("AutoAssist")

    def __init__(
        self,
        *,
        gamma: float = 0.3,
        assistant: nn.Module | None = None,
        num_buckets: int = 4096,
        lr: float = 0.1,
        smoothing: float = 0.95,
        start: float = 0.0,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma <= 1:
            raise ValueError(
                f"AutoAssist({gamma=}): expected a number in [0, 1], the chance of a sample that is surely easy. 0.3 is the"
                " source's, 1 is plain training."
            )
        if assistant is not None and not isinstance(assistant, nn.Module):
            raise ValueError(
                f"AutoAssist({assistant=}): expected a module that returns a logit for each sample of a batch, or None for a"
                " logistic regression."
            )
        if assistant is not None and not any(p.requires_grad for p in assistant.parameters()):
            raise ValueError(
                f"AutoAssist(assistant={type(assistant).__name__}(...)): got a module without trainable parameters; expected"
                " one that can learn. Make its layers in __init__."
            )
        if isinstance(num_buckets, bool) or not isinstance(num_buckets, int) or num_buckets < 1:
            raise ValueError(f"AutoAssist({num_buckets=}): expected an integer >= 1, how many weights it has.")
        if not 0 < lr < float("inf"):
            raise ValueError(f"AutoAssist({lr=}): expected a finite number > 0, the rate of the assistant's AdaGrad.")
        if not 0 <= smoothing < 1:
            raise ValueError(f"AutoAssist({smoothing=}): expected a number in [0, 1), the weight of the past.")
        if not 0 <= start <= 1:
            raise ValueError(
                f"AutoAssist({start=}): expected a share of the budget in [0, 1], from which on it picks. 1 is plain training."
            )
        check_sample_loss("AutoAssist", sample_loss)
        self.gamma, self.assistant, self.num_buckets, self.lr = gamma, assistant, num_buckets, lr
        self.smoothing, self.start, self.sample_loss = smoothing, start, sample_loss
        self._reset()

    def _reset(self) -> None:
        self._scorer = Scorer("AutoAssist", self.sample_loss, bounds=False)
        self._own: Assistant | None = None
        self._seen: tuple[int, Any, Tensor, list[Any]] | None = None  # of a micro-batch, until it ends
        self._active, self._fraction = False, 1.0
        self._steps = {"on": 0, "off": 0}
        self._samples = {"seen": 0, "trained": 0}

    @property
    @override
    def neutral(self) -> bool:
        return self.gamma == 1 or self.start == 1

    @override
    def check(self, session: Session) -> None:
        if self.start > 0 and not session.progress.limits():
            raise ValueError(
                f"AutoAssist(start={self.start}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so how"
                " far the run is cannot be told. Set one of them, or start=0."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        strategy = session.trainer.strategy
        self._own = Assistant(
            self.assistant,
            num_buckets=self.num_buckets,
            lr=self.lr,
            smoothing=self.smoothing,
            seed=session.seed,
            device=strategy.root_device,
        )
        if self.assistant is not None and session.replicas.count > 1:  # each rank may have drawn its own
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
        self._fraction = trained / size
        self._steps["on" if self._active else "off"] += 1
        self._samples["seen"] += size
        self._samples["trained"] += trained
        return output

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        own, seen = self._own, self._seen
        if own is None or seen is None:
            return
        self._seen = None
        global_step, batch, losses, told = seen
        count = sum(number for _, number in told)
        if not count:  # the user's step skipped this batch
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

    # -- what it tells and keeps

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "assistant": None if self._own is None else self._own.state_dict(),
            "active": self._active,
            "fraction": self._fraction,
            "steps": dict(self._steps),
            "samples": dict(self._samples),
            "checked": self._scorer.checked,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._own is not None and state_dict["assistant"] is not None:
            self._own.load_state_dict(state_dict["assistant"])
        self._active, self._fraction = state_dict["active"], state_dict["fraction"]
        self._steps, self._samples = dict(state_dict["steps"]), dict(state_dict["samples"])
        self._scorer.checked = state_dict["checked"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        own = self._own
        told = {} if own is None or math.isnan(own.accuracy) else {"threshold": own.threshold, "accuracy": own.accuracy}
        return {"active": int(self._active), "fraction": self._fraction, **told}

    @override
    def summary(self) -> str:
        steps, samples = self._steps, self._samples
        return (
            f"picked samples in {steps['on']:,} of {sum(steps.values()):,} steps, trained on {samples['trained']:,} of"
            f" {samples['seen']:,} samples"
        )
