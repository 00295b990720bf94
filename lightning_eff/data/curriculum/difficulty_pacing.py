"""Difficulty pacing: train on the easiest samples first, and on more of them later (Platanios et al. 2019)."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Either, Fraction, Number, OneOf
from lightning_eff._core._arguments.objects import Instance, PerSample
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.by_index import losses_of_each_sample, of_each_sample
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer
from lightning_eff._core._samples.technique import Choice as Chosen
from lightning_eff._core._samples.technique import Epoch, SampleChooser
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._difficulty import sample_length

WHO = "DifficultyPacing"


def paced_share(u: float, *, c0: float, until: float, p: float = 1.0) -> float:
    """Compute the fraction of samples ``c(u) = min(1, (c0^p + (1 - c0^p) u / until)^(1/p))``, and 1 from ``until`` on."""
    if u >= until:
        return 1.0
    return min(1.0, (c0**p + (1 - c0**p) * u / until) ** (1 / p))


def prefix_size(share: float, size: int) -> int:
    """Compute ``floor(c N)``, at least 1, without losing a sample to rounding errors."""
    return max(1, min(size, math.floor(share * size + 1e-9 * size)))


def places(scores: Tensor) -> Tensor:
    """Rank samples from easy (low scores) to hard, from 0 on, with ties by index, shape (N,), long."""
    order = torch.sort(scores, stable=True).indices
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order))
    return found


def passes_over(among: Tensor, number: int, generator: torch.Generator, *, in_order: bool) -> Tensor:
    """Repeat all of ``among``, each time in a new random order, up to ``number`` samples.

    Args:
        among: indices of the data set, shape (m,), m >= 1.
        number: the number of samples.
        generator: draws the orders.
        in_order: whether the first pass keeps the order.
    """
    found, count = [among] if in_order else [], len(among) if in_order else 0
    while count < number:
        found.append(among[torch.randperm(len(among), generator=generator)])
        count += len(among)
    return torch.cat(found)[:number]


def _random_order(technique: "DifficultyPacing") -> Mapping[str, Callback]:
    """Use as many samples at a time, whether easy or hard (Wu et al.'s random curriculum)."""
    if technique.neutral or technique.score == "random":
        return {}
    kept = {name: getattr(technique, name) for name in ("c0", "until", "p", "granularity")}
    return {"the same pacing, in a random order": DifficultyPacing("random", **kept)}


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss of each sample cannot be seen"
    return None if profile.epochs > 0.1 else "the run sees too little of its data to choose from it"


class DifficultyPacing(SampleChooser):
    """Train on the easiest samples first, and on more and more of the data set.

    Batches come from the ``c(u) N`` easiest of the data set's ``N`` samples. At the used fraction ``u`` of the budget, ``c =
    min(1, (c0^p + (1 - c0^p) u / until)^(1/p))``. Epochs keep their length: the easy samples come in the user's own order
    first, and then again, in a new random order each time. So steps, schedules and epochs are those of the plain run, and
    weighted samplers keep their weights. From ``c = 1`` on, epochs are the user's own. Growth takes effect between
    optimizer steps, also in mid-epoch: the rest of the epoch is drawn again from the larger set. Batches that worker
    processes have begun to load stay.

    Use it for short runs or noisy labels. Wu et al. find no gain in ordinary training. Scoring by ``"loss"`` costs one forward
    pass over the data set before the first step, in evaluation mode. Its random draws do not affect the run. Scores are
    computed once and are part of checkpoints.

    DeepSpeed's curriculum is similar. Its ``fixed_root`` schedule grows with a root of time, ``c = c0 + (1 - c0) (u /
    until)^(1/r)``. With ``r = p = 1`` (``fixed_linear``) both are the same, and with a small ``c0`` they hardly differ.

    It logs ``share`` (``c`` at the last step) and ``samples`` (the number of samples).

    Args:
        score: the difficulty of each sample, low is easy. Give one number per sample of the data set, shape (N,), or a name:
            ``"length"`` is its number of tokens, ``"loss"`` its loss under ``reference`` or the initial module, and
            ``"random"`` the control.
        c0: the fraction of the samples that training begins with. 1 is plain training.
        until: the fraction of the budget at which all samples are used. 0 is plain training.
        p: the power of the pacing. 1 grows linearly, 2 fast at first (Platanios et al.'s square root), 1/2 slowly.
        granularity: the step by which the fraction of samples grows. Each growth draws the rest of the epoch again.
        reference: a LightningModule whose ``training_step`` takes the same batches, for ``score="loss"``. With ``sample_loss``,
            any module. None takes the module itself.
        sample_loss: a function of (module, batch) that returns one loss per sample, shape (B,), for losses that cannot be seen
            per sample.

    Raises:
        ValueError: for a value out of range, or scores that are NaN. Before the first step, on all ranks, if the number of
            scores is not that of the samples, the easiest samples are fewer than a batch of all ranks, lengths are not found or
            all the same, or a sample's loss cannot be seen or is not finite.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[DifficultyPacing("length", c0=0.3, until=0.5)])

    References:
        Bengio et al. 2009, "Curriculum Learning". Platanios et al. 2019, "Competence-based Curriculum Learning for Neural
        Machine Translation", arXiv:1903.09848 (the pacing). Wu et al. 2021, "When Do Curricula Work?", arXiv:2012.03107.
    """

    saves = "steps, in short or noisy training (Wu et al. find none in ordinary training)"
    paper = "Wu et al. 2021, arXiv:2012.03107; Platanios et al. 2019, arXiv:1903.09848"
    constraints = "needs one DataLoader over a map-style data set, and a visible loss per sample for score='loss'"
    needs: ClassVar[Need] = Need.STEP
    search_space = SearchSpace(
        {
            "score": Choice(("loss",)),
            "c0": Uniform(0.1, 0.6),
            "until": Uniform(0.1, 0.8),
            "p": Choice((0.5, 1.0, 2.0)),
        },
        _pointless,
    )
    control = Control("as many samples at a time, whether easy or hard", _random_order)
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"c0": 1.0, "until": 0.0}
    checkpointed = ("_share", "_scores", "_plain", "_samples", "_whole_from")

    def __init__(
        self,
        score: Annotated[
            str | Sequence[float] | Tensor, Either(OneOf("length", "loss", "random"), PerSample(infinite=True))
        ],
        c0: Annotated[float, Fraction(above=0)] = 0.3,
        until: Annotated[float, Fraction()] = 0.5,
        *,
        p: Annotated[float, Number(above=0)] = 1.0,
        granularity: Annotated[float, Fraction()] = 0.01,
        reference: Annotated[LightningModule, Instance("a module", (nn.Module,))] | None = None,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if not (isinstance(score, str) and score == "loss"):
            for name, value in (("reference", reference), ("sample_loss", sample_loss)):
                if value is not None:
                    raise ValueError(
                        f"{WHO}({name}=...): only score='loss' uses it. Add score='loss', or remove {name}."
                    )
        if reference is not None and sample_loss is None and not is_a(reference, LightningModule):
            raise ValueError(
                f"{WHO}(reference={type(reference).__name__}(...)): expected a LightningModule, whose training_step returns the"
                " loss. For another module, also give sample_loss=, a function of (module, batch)."
            )
        self.score = score if isinstance(score, str) else "given"
        if self.score != "loss":  # nothing runs to compute it
            self.needs, self.refuses = Need.BATCH, {}  # pyright: ignore[reportAttributeAccessIssue]
        self.given = score if isinstance(score, Tensor) else None
        self.c0, self.until, self.p, self.granularity = c0, until, p, granularity
        self.reference, self.sample_loss = reference, sample_loss

    def _reset(self) -> None:
        self._share = self.c0
        self._scores: Tensor | None = None  # those that were computed here
        self._places: Tensor | None = None
        self._plain: Tensor | None = None  # the user's own epoch, until c = 1
        self._samples = 0
        self._whole_from: int | None = None  # the step from which on all samples are used

    @override
    def check(self, session: Session) -> None:
        own_step = self.score == "loss" and self.reference is None and self.sample_loss is None
        if own_step and not session.module.automatic_optimization:
            raise ValueError(
                f"{WHO}(score='loss'): {type(session.module).__name__} has automatic_optimization=False, so its training_step"
                " changes weights and cannot be run for losses. Give reference=, sample_loss= or other scores."
            )

    def share_at(self, u: float) -> float:
        """Compute ``c(u)``, rounded down to ``c0`` plus a multiple of ``granularity``, or 1 once that is reached."""
        c = paced_share(u, c0=self.c0, until=self.until, p=self.p)
        if c >= 1 or not self.granularity:
            return c
        return self.c0 + math.floor((c - self.c0) / self.granularity + 1e-9) * self.granularity

    # -- an epoch's samples

    @override
    def choose(self, epoch: Epoch) -> Chosen | None:
        count = prefix_size(self._share, epoch.size)
        self._samples = count
        if count == epoch.size and epoch.left is None:
            self._plain = None
            return None
        first = self._plain is None
        if epoch.left is None:
            self._plain = epoch.order
        if self._plain is None:  # an epoch that a checkpoint of another technique chose
            return None
        if self._places is None:
            self._places = self._order(epoch.size)
        among = self._plain[self._places[self._plain] < count]
        if first or not len(among):  # later epochs of a random sampler may have fewer, which repeat
            self._check_enough(among, count, epoch.size)
        generator = self.session.generator(WHO, epoch.number, count, epoch.left or 0)
        number = len(self._plain) if epoch.left is None else epoch.left
        return Chosen(passes_over(among, number, generator, in_order=epoch.left is None))

    def _check_enough(self, among: Tensor, count: int, size: int) -> None:
        loader = self.session.loaders.latest
        assert loader is not None and loader.chosen is not None
        batch = (loader.chosen.batch_size or 1) * self.session.replicas.count
        if len(among) < batch:
            drawn = "" if len(among) == count else f", of which the loader's sampler yields {len(among)},"
            raise ValueError(
                f"{WHO}(c0={self.c0}): the easiest {count:,} of {size:,} samples{drawn} are fewer than the {batch:,} of a batch"
                f" over all ranks. Use c0={min(1.0, batch / size):.3g} or more, or smaller batches."
            )

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self._share >= 1:
            return
        window = session.trainer.accumulate_grad_batches
        if (batch_idx + 1) % window and not session.epoch_complete():
            return
        share = self.share_at(session.progress.u)
        if share <= self._share:
            return
        self._share = share
        if share >= 1:
            self._whole_from = session.trainer.global_step
        self.choose_again()

    # -- scores

    def _order(self, size: int) -> Tensor:
        """The rank of each sample in the order of difficulty."""
        scores = self.given if self.given is not None else self._scores
        if scores is None:
            scores = self._scores = self._found(size)
        if len(scores) != size:
            raise ValueError(
                f"{WHO}(score=...): got {len(scores):,} scores for a data set of {size:,} samples; expected one per sample."
                " Give the scores of this data set."
            )
        return places(scores)

    def _found(self, size: int) -> Tensor:
        session = self.session
        if self.score == "random":
            return torch.rand(size, generator=session.generator(WHO, "random"), dtype=torch.float64)
        if self.score == "loss":
            scorer = Scorer(WHO, self.sample_loss, bounds=False)
            return losses_of_each_sample(session, scorer, self.reference)
        lengths = of_each_sample(session, sample_length, who=WHO)
        if bool((lengths == lengths[0]).all()):
            raise ValueError(
                f"{WHO}(score='length'): all {size:,} samples have {int(lengths[0])} tokens, so the length says nothing about"
                " difficulty. Use score='loss', one number per sample, or samples with an attention_mask of their padding."
            )
        return lengths

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"share": self._share, "samples": self._samples}

    @override
    def summary(self) -> str:
        if not self._samples:
            return "no step taken"
        if self._whole_from is not None:
            return f"from the easiest {self.c0:.0%} of the samples to all of them from step {self._whole_from:,} on"
        return f"trained on the easiest {self._samples:,} samples ({self._share:.0%}) at the end"

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._places = None
