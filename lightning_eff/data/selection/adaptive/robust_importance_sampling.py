"""Robust approximate importance sampling: draw by worst-case gradient norms (Johnson & Guestrin 2018)."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff._core._samples.technique import Choice as Chosen
from lightning_eff._core._samples.technique import Epoch, SampleChooser
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import others
from lightning_eff.data.selection._weighing import draw
from lightning_eff.data.selection.adaptive._advance import Advance
from lightning_eff.data.selection.adaptive._uncertainty import Moments, features, fit, mixed_with_uniform, worst_norms

WHO = "RobustImportanceSampling"


def unbiased_weights(p: Tensor) -> Tensor:
    """Compute ``w_i = 1 / (n p_i)``: for samples drawn with ``p``, the expected mean of ``w_i f_i`` is the mean of ``f``."""
    return 1 / (len(p) * p)


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss of each sample cannot be seen"
    return None if profile.epochs > 1.5 else "it draws from the second epoch on, and the run ends before it pays"


class RobustImportanceSampling(SampleChooser):
    """Draw samples of the whole data set by their gradient norm, and reweight them to keep the gradient unbiased.

    The best probabilities are proportional to each sample's gradient norm, which would have to be computed for all samples.
    This technique estimates the norms from those last seen. A sample has the features ``s_i = (m, g_i, m a_i)``: the mean
    norm ``m``, its last norm ``g_i``, and the age ``a_i`` of that norm in epochs. The run learns an uncertainty set, an
    ellipsoid around ``<c, s_i>`` of extent ``<d, s_i>``, which is as small as the observed norms allow. It draws with
    ``p_i`` proportional to the worst-case norms of the set, ``v_i = <c, s_i> + k <d, s_i>``, so samples with old or badly
    predicted norms are drawn more often. A fraction ``uniform`` of ``p`` is uniform. An epoch draws as many samples as the
    user's own, with replacement, and weights the loss of each by ``1 / (n p_i)``.

    The norms are those of the gradient with respect to the input of the loss function (the logits, over all tokens of a
    sample). They are read off the training pass, so the only extra cost is a backward pass through the loss function. The first
    epoch is the user's own. After that, the set and the draws are renewed ``refits`` times per epoch, at the same step on all
    ranks.

    Because the gradient varies less, steps can be longer. The gain ``r = E|g_U|^2 / E|g_R|^2`` compares the second moments of
    the gradient under uniform draws and under these draws, at the bias of the last linear layer. With ``adapt``, each step uses
    ``r`` times the learning rate and counts as ``r`` steps. The module's own schedulers advance that much faster, and a run
    with ``max_steps`` or ``max_epochs`` ends when they reach their end. :class:`LearningRateSchedule` and other techniques
    follow the run's own budget.

    Use it for runs of several epochs over samples that differ a lot. It does not pay in a single pass over the data. Wrong
    labels have large gradients and are drawn often. If samples have different numbers of tokens, the mean loss of a batch is a
    ratio and slightly biased, as in plain training. With dropout and augmentation, each norm comes from one random draw.

    It logs ``gain``, ``effective_steps``, ``spread`` (``n sum p_i^2``, which is 1 for uniform draws), and ``least`` and
    ``most`` (the extremes of ``n p_i``).

    Args:
        uniform: the fraction of the probabilities that is uniform. No ``p_i`` is below ``uniform / n``, and no weight above
            ``1 / uniform``. 1 is plain training.
        refits: the number of times per epoch that the set is learned and samples are drawn.
        adapt: whether to lengthen steps and advance schedules by the gain.
        smoothing: the weight of earlier steps in the moving means behind the gain.
        labels: the labels in the batch, by name or position. Give them if the labels are not found.

    Raises:
        ValueError: for a value out of range. When training starts, if the loader is not one over a map-style data set. At the
            first step, on all ranks, if the loss of a sample cannot be seen.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RobustImportanceSampling(uniform=0.1)])

    References:
        Johnson and Guestrin 2018, "Training Deep Models Faster with Robust, Approximate Importance Sampling", NeurIPS 31. These
        features, the uniform part, the estimate of the true gradient's second moment and the solver are this package's.
    """

    saves = "steps: the gradient varies less, so steps can be longer"
    paper = "Johnson & Guestrin 2018, NeurIPS 31"
    constraints = "needs one DataLoader over a map-style data set, a visible loss per sample, and several epochs"
    needs: ClassVar[Need] = Need.STEP
    search_space = SearchSpace({"uniform": Choice((0.1, 0.3, 0.5)), "adapt": Choice((True, False))}, _pointless)
    control = Control("the baseline, which draws uniformly and scores nothing")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("DataPruning", "DifficultyPacing", "SampleSubset", "TokenBudgetBatches"),
            "both choose the samples of an epoch",
        ),
        **others(WHO),
        "SequenceLengthWarmup": "it splits a sample into several rows, so the sample no longer has one norm and one weight",
    }
    wants_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"uniform": 1.0}

    def __init__(
        self,
        uniform: Annotated[float, Fraction(above=0)] = 0.1,
        *,
        refits: Annotated[int, Count()] = 4,
        adapt: bool = True,
        smoothing: Annotated[float, Fraction(below=1)] = 0.9,
        labels: Annotated[Sequence[str | int] | None, BatchKeys(empty=True, hint="For example ['labels'].")] = None,
    ) -> None:
        self.uniform, self.refits, self.adapt, self.smoothing = uniform, refits, adapt, smoothing
        self.labels = labels

    def _reset(self) -> None:
        self._norms = torch.empty(0)  # last norm of each sample of the data set, NaN for none
        self._steps = torch.empty(0)  # the optimizer step of that norm
        self._told: list[tuple[int, list[int], Tensor, Tensor | None]] = []  # norms of this rank since the last refit
        self._known: list[Tensor] = []  # features, norm and weight of samples seen again, (m, 5) each
        self._c = self._d = torch.zeros(3, dtype=torch.float64)
        self._plain: Tensor | None = None  # the epoch that the user's loader would have
        self._moments = Moments()
        self._window: list[tuple[float, float, float, int]] = []  # of this rank's micro-batches since the last step
        self._samples = 0  # of the last step, over all ranks
        self._gain = 1.0
        self._spread = self._least = self._most = 1.0
        self._refits = 0
        self._scaled: ScaledSteps | None = None
        self._advance = Advance()

    @override
    def on_optimizers(self, session: Session) -> None:
        if self.adapt:
            self._scaled = ScaledSteps(session.optimizers, lambda: self._gain)

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        if self._scaled is not None:
            self._scaled.remove()
            self._scaled = None

    # -- an epoch's samples

    @override
    def choose(self, epoch: Epoch) -> Chosen | None:
        start = time.perf_counter()
        if epoch.left is None:
            self._plain = epoch.order
        if self._plain is None:  # an epoch that a checkpoint of another technique chose
            return None
        self._take_in(epoch.size)
        if not self._known:
            return None  # nothing to learn the set from yet: the user's own epoch
        s = features(self._norms, self._ages())[self._plain]
        known = torch.cat(self._known)
        self._c, self._d = fit(known[:, :3], known[:, 3], known[:, 4], s.sum(dim=0))
        v = worst_norms(s, self._c, self._d)
        p = mixed_with_uniform(v, self.uniform)
        self._refits += 1
        n = len(p)
        self._spread, self._least, self._most = n * float(p.square().sum()), n * float(p.min()), n * float(p.max())
        number = n if epoch.left is None else epoch.left
        at = draw(p, number, self.session.generator(WHO, epoch.number, epoch.left or 0))
        self.session.chain.cost.seconds += time.perf_counter() - start
        return Chosen(self._plain[at], unbiased_weights(p)[at])

    def _ages(self) -> Tensor:
        """The number of epochs since each sample was seen, (N,)."""
        assert self._plain is not None
        steps = max(1.0, len(self._plain) / max(self._samples, 1))
        return (self.session.trainer.global_step - self._steps) / steps

    def _take_in(self, size: int) -> None:
        """Take in what all ranks have seen since the last refit, in the order of the steps."""
        if len(self._norms) != size:
            self._norms, self._steps = torch.full((size,), torch.nan), torch.full((size,), torch.nan)
        every = [told for rank in self.session.gather(_on_cpu(self._told)) for told in rank]
        self._told = []
        assert self._plain is not None
        epoch = max(1.0, len(self._plain) / max(self._samples, 1))
        for step, indices, norms, weights in sorted(every, key=lambda told: told[0]):
            at = torch.tensor(indices)
            seen = self._norms[at].isfinite()
            if bool(seen.any()):
                s = features(self._norms, (step - self._steps) / epoch)[at[seen]]
                w = torch.ones(len(at)) if weights is None else weights
                self._known.append(torch.cat([s, norms[seen, None].double(), w[seen, None].double()], dim=1))
            self._norms[at], self._steps[at] = norms, float(step)
        while len(self._known) > 1 and sum(len(k) for k in self._known[1:]) >= size:
            self._known.pop(0)  # one epoch's worth is enough

    # -- a step's norms

    @override
    def on_gradients(self, indices: list[int], norms: Tensor, sums: Tensor) -> None:
        session = self.session
        weights = session.sample_weights
        self._told.append((session.trainer.global_step, list(indices), norms, weights))
        w = torch.ones_like(norms) if weights is None else weights.to(norms)
        squares = sums.square().sum(dim=1)
        drawn = (w[:, None] * sums).mean(dim=0).square().sum()
        found = torch.stack([(w * squares).mean(), (w.square() * squares).mean(), drawn]).tolist()
        self._window.append((found[0], found[1], found[2], len(indices)))

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        trainer = session.trainer
        over = session.epoch_complete()
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or over:
            parts = [part for rank in session.gather(self._window) for part in rank]
            self._window = []
            if parts:
                self._take_step(parts)
            self._advance.after(session, self._gain if self.adapt else 1.0, epoch_over=over)
            self._gain = self._moments.gain(self._samples) if self._samples else 1.0
        batches = trainer.num_training_batches
        every = max(1, math.ceil(batches / self.refits)) if math.isfinite(batches) else 0
        ready = every and (batch_idx + 1) % every == 0 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if ready and not over:
            self.choose_again()

    def _take_step(self, parts: list[tuple[float, float, float, int]]) -> None:
        """Update the moments from a step's micro-batches on all ranks, each with its number of samples b."""
        self._samples = sum(b for *_, b in parts)
        uniform = sum(u * b for u, _, _, b in parts) / self._samples
        drawn = sum(r * b for _, r, _, b in parts) / self._samples
        # E|g_b|^2 = E|g_1|^2 / b + (1 - 1/b) |grad F|^2
        several = [((m - r / b) / (1 - 1 / b)) for _, r, m, b in parts if b > 1]
        signal = sum(several) / len(several) if several else 0.0
        if math.isfinite(uniform + drawn + signal):
            self._moments.take(uniform, drawn, signal, self.smoothing)

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {
            "gain": self._gain,
            "effective_steps": self._advance.steps,
            "spread": self._spread,
            "least": self._least,
            "most": self._most,
        }

    @override
    def summary(self) -> str:
        if not self._refits:
            return "drew uniformly: no norm was known yet"
        return (
            f"refit {self._refits:,} times, probabilities {self._least:.2g} to {self._most:.2g} times uniform at the end, gain"
            f" {self._gain:.2f}, {self._advance.steps:,.1f} effective steps"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        ranks = [] if session is None else session.gather((_on_cpu(self._told), self._window))
        return {
            "norms": self._norms.clone(),
            "steps": self._steps.clone(),
            "known": list(self._known),
            "set": (self._c, self._d),
            "plain": self._plain,
            "moments": dict(vars(self._moments)),
            "numbers": (self._samples, self._gain, self._spread, self._least, self._most, self._refits),
            "advance": self._advance.state_dict(),
            "ranks": ranks,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._norms, self._steps = state_dict["norms"].clone(), state_dict["steps"].clone()
        self._known, self._plain = list(state_dict["known"]), state_dict["plain"]
        self._c, self._d = state_dict["set"]
        self._moments = Moments(**state_dict["moments"])
        self._samples, self._gain, self._spread, self._least, self._most, self._refits = state_dict["numbers"]
        self._advance.load_state_dict(state_dict["advance"])
        rank, ranks = 0 if self._session is None else self._session.rank, state_dict["ranks"]
        told, window = ranks[rank] if rank < len(ranks) else ([], [])
        self._told, self._window = list(told), [tuple(part) for part in window]


def _on_cpu(told: list[tuple[int, list[int], Tensor, Tensor | None]]) -> list[Any]:
    return [
        (step, indices, norms.cpu(), None if weights is None else weights.cpu())
        for step, indices, norms, weights in told
    ]
