"""Difficulty pacing: train on the easiest samples first, and on ever more of them (Platanios et al. 2019; Wu et al. 2021)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.by_index import losses_of_each_sample, of_each_sample
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core._samples.scoring import Scorer
from lightning_eff._core._samples.technique import Choice as Chosen
from lightning_eff._core._samples.technique import Epoch, SampleChooser
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._difficulty import sample_length

WHO = "DifficultyPacing"
NAMED = ("length", "loss", "random")


def paced_share(u: float, *, c0: float, until: float, p: float = 1.0) -> float:
    """``c(u) = min(1, (c0^p + (1 - c0^p) u / until)^(1/p))``, and 1 from ``until`` on: the share of the samples."""
    if u >= until:
        return 1.0
    return min(1.0, (c0**p + (1 - c0**p) * u / until) ** (1 / p))


def prefix_size(share: float, size: int) -> int:
    """``floor(c N)``, at least 1; a share that is a hair below a whole number of samples, by rounding, is that number."""
    return max(1, min(size, math.floor(share * size + 1e-9 * size)))


def places(scores: Tensor) -> Tensor:
    """Each sample's place in the order from easy (low scores) to hard, from 0; ties by index. Shape (N,), long."""
    order = torch.sort(scores, stable=True).indices
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order))
    return found


def passes_over(among: Tensor, number: int, generator: torch.Generator, *, in_order: bool) -> Tensor:
    """``number`` samples: all of ``among``, again and again, each time in another random order.

    Args:
        among: indices of the data set, shape (m,), m >= 1.
        number: how many are wanted.
        generator: draws the orders.
        in_order: the first time as they stand.
    """
    found, count = [among] if in_order else [], len(among) if in_order else 0
    while count < number:
        found.append(among[torch.randperm(len(among), generator=generator)])
        count += len(among)
    return torch.cat(found)[:number]


def _random_order(technique: "DifficultyPacing") -> Mapping[str, Callback]:
    """As many samples at a time, easy or hard ones (Wu et al.'s random curriculum)."""
    if technique.neutral or technique.score == "random":
        return {}
    kept = {name: getattr(technique, name) for name in ("c0", "until", "p", "granularity")}
    return {"the same pacing, in a random order": DifficultyPacing("random", **kept)}


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss cannot be taken apart by sample"
    return None if profile.epochs > 0.1 else "the run sees too little of its data to choose from it"


class DifficultyPacing(SampleChooser):
    """Draw each batch from the ``c(u) N`` easiest of the data set's N samples, with c growing from ``c0`` to 1.

    At the share ``u`` of the budget, ``c = min(1, (c0^p + (1 - c0^p) u / until)^(1/p))``. The epoch keeps its length:
    those of the user's own order that are easy enough come in that order, and then again, in a new random order each
    time. So steps, schedules and epochs are those of the plain run, and what a sampler weighs stays weighed. From c = 1
    on, epochs are the user's own. Growth takes effect between optimizer steps, in mid-epoch too: what is still to come
    is drawn anew from the larger prefix, with the ``u`` of the step that has ended; batches that worker processes have
    begun to load stay.

    DeepSpeed's curriculum is of the same family: its ``fixed_root`` schedule, ``floor((t / T_c)^(1/r) (max - min) +
    min)`` down to a multiple of ``difficulty_step``, by percentiles of difficulty, lets c itself start at ``c0 = min``
    and grow by the root of time, ``c0 + (1 - c0) (u / until)^(1/r)``. With ``r = p = 1`` (its ``fixed_linear``) the
    two are one; else Platanios' form, this one, moves ``c^p`` evenly. With a small ``c0`` they hardly differ.

    Scores by ``"loss"`` cost one forward pass over the data set before the first step, in evaluation mode; what the
    data set draws at random is drawn for it apart from the run. Scores that are found here are in the checkpoint, and
    found once.

    Logged: ``share``, c at the last step, and ``samples``, how many that are.

    Args:
        score: how difficult each sample is, low is easy: one number for each index of the data set (a tensor or
            sequence of shape (N,)), or ``"length"``, its tokens, or ``"loss"``, its loss by ``reference`` or by the
            module as the run begins, or ``"random"``, the control.
        c0: the share of the samples that training begins with, in (0, 1]. 1 is plain training.
        until: fraction of the budget in [0, 1] at which all samples are in; 0 is plain training.
        p: the power, > 0: 1 lets the share grow evenly, 2 fast at first (Platanios et al.'s square root), 1/2 slowly.
        granularity: c is rounded down to steps of this size above ``c0``, in [0, 1]; each costs a draw of the epoch's
            rest.
        reference: whose losses count where ``score="loss"``: a LightningModule, whose ``training_step`` takes the same
            batches, or any module with ``sample_loss``. None is the module that is trained.
        sample_loss: for a loss that cannot be seen by sample: a function of (module, batch) that returns the losses of
            the batch's samples, shape (B,).

    Raises:
        ValueError: if an argument is out of its range, or scores are nan; before the first step, on all ranks, if there
            are not as many scores as samples, if the first prefix is smaller than a batch of all ranks, if lengths are
            not found or all alike, or if a sample's loss cannot be seen or is not finite.

    Sources:
        Bengio et al. 2009 (curricula); Platanios et al. 2019, arXiv:1903.09848 (the rule); Wu et al. 2021,
        arXiv:2012.03107: it helps short or noisy training, and the order itself hardly matters else.
    """

    saves: ClassVar[str] = "steps, in short or noisy training (Wu et al. find none in ordinary training)"
    paper: ClassVar[str] = "Wu et al. 2021, arXiv:2012.03107; Platanios et al. 2019, arXiv:1903.09848"
    constraints: ClassVar[str] = "one DataLoader over a map-style data set; score='loss' needs a loss seen by sample"
    needs: ClassVar[Need] = Need.STEP
    survey: ClassVar[Survey | None] = Survey("curriculum learning", shen="3.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "score": Choice(("loss",)),
            "c0": Uniform(0.1, 0.6),
            "until": Uniform(0.1, 0.8),
            "p": Choice((0.5, 1.0, 2.0)),
        },
        _pointless,
    )
    control: ClassVar[Control] = Control("as many samples at a time, easy or hard", _random_order)
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        score: str | Sequence[float] | Tensor,
        c0: float = 0.3,
        until: float = 0.5,
        *,
        p: float = 1.0,
        granularity: float = 0.01,
        reference: LightningModule | None = None,
        sample_loss: SampleLoss | None = None,
    ) -> None:
        if not 0 < c0 <= 1:
            raise ValueError(
                f"{WHO}({c0=}): expected a number in (0, 1], the share of the samples that training begins with. 1 is"
                " plain training."
            )
        if not 0 <= until <= 1:
            raise ValueError(
                f"{WHO}({until=}): expected a fraction of the budget in [0, 1], from which on all samples are in."
            )
        if not 0 < p < math.inf:
            raise ValueError(f"{WHO}({p=}): expected a finite number > 0, the power of the pacing. 1 is linear.")
        if not 0 <= granularity <= 1:
            raise ValueError(
                f"{WHO}({granularity=}): expected a share of the samples in [0, 1], by which the prefix grows at a time."
            )
        if not (isinstance(score, str) and score == "loss"):
            for name, value in (("reference", reference), ("sample_loss", sample_loss)):
                if value is not None:
                    raise ValueError(
                        f"{WHO}({name}=...): expected score='loss' beside it; other scores take no module."
                    )
        if sample_loss is not None and not callable(sample_loss):
            raise ValueError(f"{WHO}({sample_loss=}): expected a function of (module, batch), or None.")
        if reference is not None and sample_loss is None and not is_a(reference, LightningModule):
            raise ValueError(
                f"{WHO}(reference={type(reference).__name__}(...)): expected a LightningModule, whose training_step returns"
                " the loss. Give sample_loss= beside it, a function of (module, batch)."
            )
        self.score = score if isinstance(score, str) else "given"
        if self.score != "loss":  # nothing is run to find it
            self.needs, self.refuses = Need.BATCH, {}  # pyright: ignore[reportAttributeAccessIssue]
        self.given = None if isinstance(score, str) else _checked(score)
        if isinstance(score, str) and score not in NAMED:
            raise ValueError(
                f"{WHO}({score=}): expected one number for each sample of the data set, or one of {', '.join(NAMED)}."
            )
        self.c0, self.until, self.p, self.granularity = c0, until, p, granularity
        self.reference, self.sample_loss = reference, sample_loss
        self._reset()

    def _reset(self) -> None:
        self._share = self.c0
        self._scores: Tensor | None = None  # those that were found here
        self._places: Tensor | None = None
        self._plain: Tensor | None = None  # the epoch that the user's loader would have, until c = 1
        self._samples = 0
        self._whole_from: int | None = None  # the step from which on all samples are in

    @property
    @override
    def neutral(self) -> bool:
        return self.c0 == 1.0 or self.until == 0.0

    @override
    def check(self, session: Session) -> None:
        own_step = self.score == "loss" and self.reference is None and self.sample_loss is None
        if own_step and not session.module.automatic_optimization:
            raise ValueError(
                f"{WHO}(score='loss'): {type(session.module).__name__} has automatic_optimization=False;"
                " expected True, because its training_step then moves weights and cannot be asked for losses alone. Give"
                " reference= or sample_loss=, or other scores."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    def share_at(self, u: float) -> float:
        """``c(u)``, rounded down to ``c0`` and a multiple of ``granularity``; 1 where that is reached."""
        c = paced_share(u, c0=self.c0, until=self.until, p=self.p)
        if c >= 1 or not self.granularity:
            return c
        return self.c0 + math.floor((c - self.c0) / self.granularity + 1e-9) * self.granularity

    # -- what an epoch has

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
        if first or not len(among):  # later epochs of a sampler that draws anew may have a few less, which come again
            self._check_enough(among, count, epoch.size)
        generator = self.session.generator(WHO, epoch.number, count, epoch.left or 0)
        number = len(self._plain) if epoch.left is None else epoch.left
        return Chosen(passes_over(among, number, generator, in_order=epoch.left is None))

    def _check_enough(self, among: Tensor, count: int, size: int) -> None:
        loader = self.session.loaders.latest
        assert loader is not None and loader.chosen is not None
        batch = (loader.chosen.batch_size or 1) * self.session.replicas.count
        if len(among) < batch:
            met = "" if len(among) == count else f", of which the loader's sampler yields {len(among)}"
            raise ValueError(
                f"{WHO}(c0={self.c0}): the easiest {count:,} of {size:,} samples{met}, are fewer than the {batch:,} of a batch"
                f" of all processes; expected as many at least. Raise c0 to {min(1.0, batch / size):.3g} or more, or make"
                " batches smaller."
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
        """Each sample's place in the order of difficulty."""
        scores = self.given if self.given is not None else self._scores
        if scores is None:
            scores = self._scores = self._found(size)
        if len(scores) != size:
            raise ValueError(
                f"{WHO}: got {len(scores):,} scores for a data set of {size:,} samples; expected one for each, in the order of"
                " their indices. Give as many, or train on the data set that they are of."
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
                f"{WHO}(score='length'): all {size:,} samples have {int(lengths[0])} tokens, so length tells no easy ones from"
                " hard ones; expected several lengths, or an attention_mask with its padding in each sample. Give score= one"
                " number for each sample, or 'loss'."
            )
        return lengths

    # -- what is told and kept

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"share": self._share, "samples": self._samples}

    @override
    def summary(self) -> str:
        if not self._samples:
            return "no step taken"
        if self._whole_from is not None:
            return f"from the easiest {self.c0:.0%} of the samples to all of them from step {self._whole_from:,} on"
        return f"on the easiest {self._samples:,} samples in the end, {self._share:.0%}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "share": self._share,
            "scores": self._scores,
            "plain": self._plain,
            "samples": self._samples,
            "whole_from": self._whole_from,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share, self._samples = state_dict["share"], state_dict["samples"]
        self._scores, self._plain = state_dict["scores"], state_dict["plain"]
        self._whole_from, self._places = state_dict["whole_from"], None


def _checked(score: Sequence[float] | Tensor) -> Tensor:
    """The scores in float64, on the CPU.

    Raises:
        ValueError: if they are no numbers in a row, or one is nan.
    """
    try:
        found = torch.as_tensor(score).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{WHO}(score={type(score).__name__}): expected one number for each sample of the data set, or one of"
            f" {', '.join(NAMED)}; {error}."
        ) from error
    if found.ndim != 1 or not len(found) or found.is_complex():
        raise ValueError(
            f"{WHO}(score=...): got {found.dtype} values of shape {tuple(found.shape)}; expected one number for each"
            " sample of the data set, shape (N,)."
        )
    found = found.double()
    if bool(found.isnan().any()):
        at = found.isnan().nonzero().flatten().tolist()
        raise ValueError(
            f"{WHO}(score=...): {len(at):,} of {len(found):,} scores are nan, the first at index {at[0]}; expected numbers,"
            " which put samples in an order. Give these samples a score, or leave them out of the data set."
        )
    return found
