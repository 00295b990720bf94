"""Robust, approximate importance sampling: draw by the worst gradient norms that samples may have (Johnson & Guestrin 2018)."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff._core._samples.technique import Choice as Chosen
from lightning_eff._core._samples.technique import Epoch, SampleChooser
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.data.selection._choosing import others
from lightning_eff.data.selection._weighing import draw
from lightning_eff.data.selection.adaptive._advance import Advance
from lightning_eff.data.selection.adaptive._uncertainty import Moments, features, fit, mixed_with_uniform, worst_norms

WHO = "RobustImportanceSampling"


def unbiased_weights(p: Tensor) -> Tensor:
    """``w_i = 1 / (n p_i)``: of samples drawn with ``p`` of n, the mean of ``w_i f_i`` is on average the mean of ``f``."""
    return 1 / (len(p) * p)


def _pointless(profile: RunProfile) -> str | None:
    if not profile.visible_loss:
        return "the loss cannot be taken apart by sample"
    return None if profile.epochs > 1.5 else "it draws from the second epoch on, and the run ends before it pays"


class RobustImportanceSampling(SampleChooser):
    """Draw samples of the whole data set by how much each may move the weights, as far as norms last seen can tell.

    The best probabilities are proportional to the norm of each sample's gradient, which nobody knows without computing it.
    Of a sample's features, ``s_i = (m, g_i, m a_i)`` with the mean norm ``m``, the norm ``g_i`` last seen and its age ``a_i``
    in epochs, the run learns a set of norms that the truth lies in: an ellipsoid about ``<c, s_i>`` of the extent ``<d,
    s_i>``, as small as what was seen since allows. Drawing with ``p_i`` proportional to the worst norms in that set, ``v_i =
    <c, s_i> + k <d, s_i>``, has the least second moment against the worst of the set: a norm that is old, or of a kind that
    was told badly, counts more than it did when last seen. A share ``uniform`` of ``p`` is even. Samples are drawn with
    replacement, as many as the user's epoch has and from those that it has, and the loss of each is weighted by ``1 / (n
    p_i)``, so that a step's gradient is on average that of the plain one.

    Norms are those of the gradient at the loss's input (the logits, over all tokens of a sample), read off the training pass
    itself: there is no extra pass, but one through the loss function. The first epoch is the user's own, which sees each
    sample once. From then on set and draws are made anew ``refits`` times an epoch, at the same time on all ranks.

    As the gradient varies less, the steps can be longer: the gain ``r = E|g_U|^2 / E|g_R|^2`` compares the second moments of
    the gradient of evenly drawn steps and of ours, here of the gradient at the last map's bias. With ``adapt`` each step is
    made at ``r`` times the rate, and counts as ``r`` steps: the module's own schedulers go that much faster, and a run with
    ``max_steps`` or ``max_epochs`` ends when its schedulers have come to the end. Until something is known, and where all norms
    are alike, ``p`` is even and the gain 1. The rates of ``LearningRateSchedule`` and its like go by the run's own budget.

    Where samples count differently many tokens, the mean loss of a batch is a quotient, and means of quotients are slightly
    biased, as in plain training. With dropout and augmentation norms are of one draw. It does not pay in a single pass over
    the data, nor where samples are much alike; wrong labels have large gradients, and are drawn often.

    Logged: ``gain``, ``effective_steps``, ``spread`` (``n sum p_i^2`` of the probabilities, 1 where they are even) and
    ``least`` and ``most``, the extremes of ``n p_i``.

    Args:
        uniform: the share of ``p`` that is even, in (0, 1]: no ``p_i`` is below ``uniform / n``, no weight above ``1 /
            uniform``. 1 is plain training.
        refits: how often an epoch the set is learnt anew, >= 1.
        adapt: lengthen steps and advance schedules by the gain.
        smoothing: the weight of the past in the moving means that the gain is made of, in [0, 1).
        labels: names or positions of the labels in the batch, where looking does not tell which they are.

    Raises:
        ValueError: for other values; as training starts, where the loader is not one over a map-style data set; at the first
            step, on all ranks, if the loss cannot be seen by sample.

    Sources:
        Johnson & Guestrin 2018, NeurIPS: the set and its learning, its minimax probabilities, weights, gain and effective
        steps, norms at the loss's input. Ours: these features, the even share, the moment of the true gradient by the means
        within batches, and the solver.
    """

    saves: ClassVar[str] = "steps: the gradient varies less, so that steps can be longer"
    paper: ClassVar[str] = "Johnson & Guestrin 2018, NeurIPS 31"
    constraints: ClassVar[str] = "one DataLoader over a map-style data set; a loss seen by sample; several epochs"
    needs: ClassVar[Need] = Need.STEP
    survey: ClassVar[Survey | None] = Survey("robust approximate importance sampling (RAIS)", zhuang="2.2", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"uniform": Choice((0.1, 0.3, 0.5)), "adapt": Choice((True, False))}, _pointless
    )
    control: ClassVar[Control] = Control("the baseline, which draws evenly and scores nothing")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("DataPruning", "DifficultyPacing", "SampleSubset", "TokenBudgetBatches"),
            "both say which samples an epoch has",
        ),
        **others(WHO),
        "SequenceLengthWarmup": "it makes several rows of a sample, which no longer has one norm and one weight",
    }
    wants_gradients: ClassVar[bool] = True

    def __init__(
        self,
        *,
        uniform: float = 0.1,
        refits: int = 4,
        adapt: bool = True,
        smoothing: float = 0.9,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        if isinstance(uniform, bool) or not isinstance(uniform, int | float) or not 0 < uniform <= 1:
            raise ValueError(
                f"{WHO}({uniform=}): expected a number in (0, 1], the share of the probabilities that is even. 1 is plain"
                " training; 0 would let samples never be drawn again."
            )
        if isinstance(refits, bool) or not isinstance(refits, int) or refits < 1:
            raise ValueError(f"{WHO}({refits=}): expected an integer >= 1, how often an epoch the set is learnt anew.")
        if not 0 <= smoothing < 1:
            raise ValueError(f"{WHO}({smoothing=}): expected a number in [0, 1), the weight of the past.")
        if isinstance(labels, str):
            raise ValueError(f"{WHO}({labels=}): expected a list of names or positions, such as ['labels'].")
        self.uniform, self.refits, self.adapt, self.smoothing = uniform, refits, adapt, smoothing
        self.labels = None if labels is None else list(labels)
        self._reset()

    def _reset(self) -> None:
        self._norms = torch.empty(0)  # of each sample of the data set, when last seen; nan where it was not
        self._steps = torch.empty(0)  # at which optimizer step that was
        self._told: list[tuple[int, list[int], Tensor, Tensor | None]] = []  # seen on this rank since the last refit
        self._known: list[Tensor] = []  # features, norm and weight of what was seen again, (m, 5) each
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

    @property
    @override
    def neutral(self) -> bool:
        return self.uniform == 1.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()

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

    # -- what an epoch has

    @override
    def choose(self, epoch: Epoch) -> Chosen | None:
        start = time.perf_counter()
        if epoch.left is None:
            self._plain = epoch.order
        if self._plain is None:  # an epoch that a checkpoint of another technique chose
            return None
        self._take_in(epoch.size)
        if not self._known:
            return None  # there is nothing yet to learn the set from: the user's own epoch
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
        """How many epochs ago each sample was seen, (N,)."""
        assert self._plain is not None
        steps = max(1.0, len(self._plain) / max(self._samples, 1))
        return (self.session.trainer.global_step - self._steps) / steps

    def _take_in(self, size: int) -> None:
        """What all ranks have seen since the last time, in the order of its steps."""
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
            self._known.pop(0)  # as much as one epoch shows is enough

    # -- what a step shows

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
        """What the micro-batches of a step of all ranks say: each of b samples, whose mean gradient is theirs."""
        self._samples = sum(b for *_, b in parts)
        uniform = sum(u * b for u, _, _, b in parts) / self._samples
        drawn = sum(r * b for _, r, _, b in parts) / self._samples
        # E|g_b|^2 = E|g_1|^2 / b + (1 - 1/b) |grad F|^2
        several = [((m - r / b) / (1 - 1 / b)) for _, r, m, b in parts if b > 1]
        signal = sum(several) / len(several) if several else 0.0
        if math.isfinite(uniform + drawn + signal):
            self._moments.take(uniform, drawn, signal, self.smoothing)

    # -- what is told and kept

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
            return "drew evenly: nothing was known yet"
        return (
            f"learnt what norms may be {self._refits:,} times; probabilities from {self._least:.2g} to {self._most:.2g} times"
            f" even ones at the end, a gain of {self._gain:.2f}, {self._advance.steps:,.1f} effective steps"
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
