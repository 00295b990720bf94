"""Compute each sample's loss in a batch, with an unchanged ``training_step`` or the user's own function."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from lightning_eff._core import rng
from lightning_eff._core._samples.functions import SampleLoss
from lightning_eff._core.batches import check_indexed, num_samples, select
from lightning_eff._core.losses import (
    CutAtLosses,
    LossCall,
    LossNotVisible,
    ObserveLosses,
    check_visible,
    contributions,
    gradient_bounds,
    loss_of,
    mean_by_sample,
    observing,
)
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Around, Proceed, Step, in_evaluation
from lightning_eff._core.wrapping import unrounded

_ADVICE = (
    " Give sample_loss=, a function of (module, batch) that returns one loss per sample as a tensor of shape (B,), or remove"
    " the technique."
)

#: What a check of a batch finds about which loss belongs to which sample.
_TOLD, _MOVED, _ALIKE, _SKIPPED = "told", "moved", "alike", "skipped"


@dataclass
class Scores:
    """The result of one pass over a batch's B samples; all but ``totals`` on the CPU in float64.

    Attributes:
        losses: ``l_i``, shape (B,), whose mean is the step's loss. Empty if the step was skipped or has a problem.
        means: each sample's own mean loss, shape (B,).
        bounds: the bound on each sample's gradient norm, shape (B,), if requested.
        totals: ``V`` of each loss call, for :class:`WeighLosses`.
        problem: the error that makes the scores unusable, to raise on all ranks.
    """

    losses: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    means: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    bounds: Tensor | None = None
    totals: list[Tensor] = field(default_factory=list)
    problem: ValueError | None = None


def agree(session: Session, problem: ValueError | None, value: Any = None) -> list[Any]:
    """Gather ``value`` of every rank, or raise the same error on all if one has a ``problem``, so that no rank waits.

    Raises:
        LossNotVisible: if that is the problem of a rank.
        ValueError: if a rank has another problem.
    """
    told = None if problem is None else (isinstance(problem, LossNotVisible), str(problem))
    gathered = session.replicas.everyone((told, value))
    found = [(f"Rank {rank}: " if len(gathered) > 1 else "", *told) for rank, (told, _) in enumerate(gathered) if told]
    if found:
        text = " ".join(f"{rank}{text}" for rank, _, text in found)
        raise LossNotVisible(text) if any(invisible for _, invisible, _ in found) else ValueError(text)
    return [value for _, value in session.replicas.of_replicas(gathered)]


def sample_losses(fn: SampleLoss, module: LightningModule, batch: Any) -> Tensor:
    """Call ``sample_loss`` and check its result.

    Raises:
        LossNotVisible: if the result is not a tensor with one loss for each sample.
    """
    with observing():
        losses = fn(module, batch)
    size = num_samples(batch)
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise LossNotVisible(
            f"sample_loss returned {got}; expected a tensor of shape ({size},), one loss for each sample of the batch."
        )
    return losses


class Scorer:
    """Computes the losses of a batch's samples.

    Args:
        who: the technique's name, for messages.
        sample_loss: the user's function for a loss that cannot be seen, or None.
        bounds: whether to compute the bound on each sample's gradient norm.

    Attributes:
        checked: True once the order of the losses is known to be that of the samples. Until then, the number of batches seen.
            It is saved with the technique's state.
    """

    def __init__(self, who: str, sample_loss: SampleLoss | None, *, bounds: bool) -> None:
        self.who = who
        self.sample_loss = sample_loss
        self.bounds = bounds
        self.checked: bool | int = False
        self._again: Callable[[list[int]], Any] | None = None

    # -- the order of losses

    def check_first(
        self, session: Session, step: Step, batch: Any, size: int, again: Callable[[list[int]], Any] | None = None
    ) -> None:
        """Check on the run's first batch that it has several samples, and which loss belongs to which sample.

        If losses are nearly equal, as with a head whose weights are zero, the check cannot decide. Then the second batch, the
        fourth, the eighth and so on are checked until it can. Batches that the step skips do not count.

        Args:
            session: the run.
            step: the current step.
            batch: a batch of several samples.
            size: the number of samples.
            again: makes a batch of some of its samples again, for batches that cannot be indexed.

        Raises:
            ValueError: on all ranks, if a rank's batch has one sample, or its losses are not in the order of the samples.
        """
        if self.checked is True:
            return
        seen, problem, told = int(self.checked) + 1, None, _TOLD
        if seen.bit_count() > 1:
            self.checked = seen
            return
        if size < 2:
            problem = ValueError(
                f"{self.who}: got a batch of {size} sample; expected several to choose from. Increase the loader's batch_size,"
                f" or remove {self.who}."
            )
        elif (unfit := _unfit(batch, size)) is not None and again is None:
            problem = ValueError(f"{self.who}: {unfit}")
        elif self.sample_loss is None:
            self._again = None if unfit is None else again
            told = self._lies_by_sample(session.seed, step, batch, size)
            if told == _MOVED:
                other = "" if step.module is session.module else f" of model={type(step.module).__name__}(...)"
                problem = LossNotVisible(
                    f"{self.who}: the loss values in the training_step{other} are not in the order of the samples, or depend on"
                    f" other samples: some changed when others of the {size} were replaced. Flatten (B, T) values with the"
                    f" batch first.{_ADVICE}"
                )
        every = agree(session, problem, told)
        if _SKIPPED not in every:
            self.checked = seen if _ALIKE in every else True

    def check_ahead(self, session: Session, step: Step, batch: Any, size: int) -> None:
        """Find in the first step, before any weight changes, errors that would only appear when samples are scored later.

        It costs one extra forward pass on the first batch whose step returns a loss.

        Raises:
            ValueError: on all ranks, as :meth:`check_first`, and if a rank's loss cannot be seen by sample or is not finite.
        """
        fresh = not self.checked
        self.check_first(session, step, batch, size)
        if fresh and self.checked:
            scores = self.score(step, batch, size)
            if not all(agree(session, scores.problem, len(scores.means) > 0)):
                self.checked = False

    def _lies_by_sample(self, seed: int, step: Step, batch: Any, size: int) -> str:
        """Return whether loss values stay when other samples are replaced, without dropout, batch statistics and low precision.

        A time-major flatten, or tokens picked by a mask, would silently assign values to the wrong samples.
        """
        every = [*step.module.modules()]
        for still in (every, [m for m in every if isinstance(m, _NormBase | _DropoutNd)]):
            try:
                with in_evaluation(still), unrounded():
                    stays = self._stays(seed, step, batch, size)
            except Exception:  # else only these layers run in evaluation mode
                if still is not every:
                    raise
                stays = None
            if stays is not None:
                return stays
        return _TOLD  # not visible at all, which the step itself will report

    def _stays(self, seed: int, step: Step, batch: Any, size: int) -> str | None:
        """Return whether the loss values of one half stay when the other half is replaced, or None if no values are seen.

        The check cannot decide if the step still draws random numbers, because other samples may get other draws. It cannot
        decide either if the values of the replaced half hardly change, because they would not show elsewhere.
        """
        half, every = size // 2, torch.arange(size)
        first = torch.cat([every[size - half :], every[half:]])
        last = torch.cat([every[: size - half], every[:half]])
        batch = batch if self._again is None else self._of(batch, every, size, seed)
        calls, skipped = self._calls(step, batch, size)
        if skipped:
            return _SKIPPED
        if calls is None:
            return None
        differ = True
        for index, kept, other in (
            (first, every[half:], every[:half]),
            (last, every[: size - half], every[size - half :]),
        ):
            after, _ = self._calls(step, self._of(batch, index, size, seed), size)
            if _moved(calls, after, kept) > 0.1:
                with rng.keyed(seed, self.who, "another draw"):
                    again, _ = self._calls(step, batch, size)
                    return _MOVED if _moved(calls, again, every) <= 0.1 else _TOLD
            differ &= _moved(calls, after, other) >= 0.25
        return _TOLD if differ else _ALIKE

    def _of(self, batch: Any, index: Tensor, size: int, seed: int) -> Any:
        """Select these samples of the batch, or make the batch again with the same random draws of the data set."""
        if self._again is None:
            return select(batch, index, size)
        with rng.keyed(seed, self.who, "again"):
            return self._again(index.tolist())

    def _calls(self, step: Step, batch: Any, size: int) -> tuple[list[LossCall] | None, bool]:
        """Record the loss calls of the step, if they can be seen, and whether it skips the batch."""
        observed = ObserveLosses(size)

        def around(run: Proceed, batch: Any) -> Any:
            with observed:
                return run(batch)

        output = step.forward_only(batch, size, around, transform=False)
        seen = observed.problem is None and bool(observed.calls)
        return observed.calls if seen else None, loss_of(output) is None

    # -- every batch

    def score(self, step: Step, batch: Any, size: int) -> Scores:
        """Score a batch of ``size`` samples in an extra forward pass."""
        if self.sample_loss is None:
            around, read = self.reading(step, size)
            step.forward_only(batch, size, around)
            return read()
        return self._told(self.sample_loss, step, batch, size)

    def reading(self, step: Step, size: int) -> tuple[Around, Callable[[], Scores]]:
        """Return a wrapper of the step that records its losses, and a function that returns the scores afterwards."""
        observed = ObserveLosses(size, bounds=self.bounds)
        losses: list[Tensor | None] = []

        def around(run: Proceed, batch: Any) -> Any:
            with observed:
                output = run(batch)
            losses.append(loss_of(output))
            return output

        def read() -> Scores:
            loss, calls = next(iter(losses), None), observed.calls
            if loss is None:  # training_step skips this batch
                return Scores()
            try:
                check_visible(observed, loss)
            except LossNotVisible as e:
                return Scores(problem=LossNotVisible(f"{self.who}: {e}{_ADVICE}"))
            bounds = gradient_bounds(calls) if self.bounds else None
            scores = _on_cpu(contributions(calls), mean_by_sample(calls), bounds)
            scores.totals = [call.total for call in calls]
            return self._finite(step, scores)

        return around, read

    def _told(self, sample_loss: SampleLoss, step: Step, batch: Any, size: int) -> Scores:
        cut = CutAtLosses()
        found: list[tuple[Tensor, Tensor | None]] = []

        def around(run: Proceed, batch: Any) -> Any:
            if not self.bounds:
                found.append((sample_losses(sample_loss, step.module, batch), None))
                return
            with cut:
                losses = sample_losses(sample_loss, step.module, batch)
            found.append((losses.detach(), cut.bounds(losses)))

        try:
            step.forward_only(batch, size, around)
            losses, bounds = ((None if t is None else _rows(t, size)) for t in found[0])
        except LossNotVisible as e:
            return Scores(problem=LossNotVisible(f"{self.who}: {e}"))
        assert losses is not None
        means = losses.mean(dim=1)
        return self._finite(step, _on_cpu(means, means, None if bounds is None else bounds.norm(dim=1)))

    def _finite(self, step: Step, scores: Scores) -> Scores:
        """Add a problem to the scores if one of them is NaN or infinite, because choosing samples would hide it."""
        bad = ~(scores.losses.isfinite() & scores.means.isfinite())
        if scores.bounds is not None:
            bad |= ~scores.bounds.isfinite()
        if not bad.any():
            return scores
        at = bad.nonzero().flatten().tolist()
        listed = ", ".join(map(str, at[:16])) + (", ..." if len(at) > 16 else "")
        return Scores(
            problem=ValueError(
                f"{self.who}: the loss of sample(s) {listed} of the {len(bad)} in batch {step.batch_idx} (after"
                f" {step.global_step} steps) is NaN or infinite, which choosing among samples would hide. Check these samples,"
                " the learning rate and the precision."
            )
        )


def _unfit(batch: Any, size: int) -> str | None:
    try:
        check_indexed(batch, size)
    except ValueError as error:
        return str(error)
    return None


def _rows(values: Tensor, size: int) -> Tensor:
    """Reshape values to (size, n), because a link may have split each sample into several."""
    if len(values) % size:
        raise LossNotVisible(f"sample_loss returned {len(values)} losses, which do not split over {size} samples.")
    return values.float().reshape(size, -1)


def _on_cpu(losses: Tensor, means: Tensor, bounds: Tensor | None) -> Scores:
    """Move the three to the CPU in one transfer."""
    together = torch.stack([losses, means] if bounds is None else [losses, means, bounds]).detach().cpu().double()
    return Scores(together[0], together[1], None if bounds is None else together[2])


def _moved(before: list[LossCall], after: list[LossCall] | None, samples: Tensor) -> float:
    """Return the fraction of the counted loss values of ``samples`` that changed, in the call where most did."""
    if after is None or len(after) != len(before):
        return 1.0
    shares = [0.0]
    for a, b in zip(before, after, strict=True):
        index = samples.to(a.rows.device)
        if a.rows.shape == b.rows.shape:
            old, new, counts = a.rows[index], b.rows[index], (a.counted[index] != 0) | (b.counted[index] != 0)
        else:  # cut to another length, or tokens picked: compare sums
            old, new = torch.stack([a.sums, a.counts])[:, index], torch.stack([b.sums, b.counts])[:, index]
            counts = torch.ones_like(old, dtype=torch.bool)
        other = ((old - new).abs() > 1e-3 * (1 + old.abs())) & counts
        shares.append(int(other.sum()) / max(int(counts.sum()), 1))
    return max(shares)
