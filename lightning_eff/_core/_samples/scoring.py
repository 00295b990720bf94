"""Each sample's loss in a batch, found forward-only through an unchanged ``training_step`` or told by the user."""

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
    " Give sample_loss=, a function of (module, batch) that returns the losses of the batch's B samples as a tensor of"
    " shape (B,), or take the technique out."
)

#: What a look at a batch says of whose loss is whose.
_TOLD, _MOVED, _ALIKE, _SKIPPED = "told", "moved", "alike", "skipped"


@dataclass
class Scores:
    """What one pass tells of a batch's B samples; all but ``totals`` on the CPU in float64.

    Attributes:
        losses: ``l_i``, shape (B,), whose mean is the step's loss; empty where the step was skipped or has a problem.
        means: each sample's own mean loss, shape (B,).
        bounds: the bound on each sample's gradient norm, shape (B,), where asked for.
        totals: ``V`` of each loss call, for :class:`WeighLosses`.
        problem: what makes the scores unusable, to be raised on all ranks.
    """

    losses: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    means: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    bounds: Tensor | None = None
    totals: list[Tensor] = field(default_factory=list)
    problem: ValueError | None = None


def agree(session: Session, problem: ValueError | None, value: Any = None) -> list[Any]:
    """``value`` of every rank, or the same error on all of them where one has a ``problem``: none waits for another.

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
    """What ``sample_loss`` returns, checked.

    Raises:
        LossNotVisible: if that is no tensor with one loss for each sample.
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
    """Finds the losses of a batch's samples.

    Args:
        who: the technique's name, for messages.
        sample_loss: the user's function for a loss that cannot be seen, or None.
        bounds: also find the bound on each sample's gradient norm.

    Attributes:
        checked: True once it is known that losses lie sample by sample; until then, how many batches have been seen. It is
            saved with the technique's state.
    """

    def __init__(self, who: str, sample_loss: SampleLoss | None, *, bounds: bool) -> None:
        self.who = who
        self.sample_loss = sample_loss
        self.bounds = bounds
        self.checked: bool | int = False
        self._again: Callable[[list[int]], Any] | None = None

    # -- whose loss is whose

    def check_first(
        self, session: Session, step: Step, batch: Any, size: int, again: Callable[[list[int]], Any] | None = None
    ) -> None:
        """Look at the run's first batch: that there is something to choose from, and whose loss is whose.

        Where losses are nearly equal, as behind a head whose weights are zero, nothing can be told. Then the second batch, the
        fourth, the eighth and so on are looked at until it can. Batches that the step skips do not count.

        Args:
            session: the run.
            step: the step at hand.
            batch: of several samples.
            size: how many.
            again: makes a batch of those of its samples anew, where they cannot be taken out of its tensors.

        Raises:
            ValueError: on all ranks, if a rank's batch holds one sample, or its loss does not lie sample by sample.
        """
        if self.checked is True:
            return
        seen, problem, told = int(self.checked) + 1, None, _TOLD
        if seen.bit_count() > 1:
            self.checked = seen
            return
        if size < 2:
            problem = ValueError(
                f"{self.who}: got a batch of {size} sample; expected several to choose from. Raise the loader's"
                " batch_size, or take the technique out."
            )
        elif (unfit := _unfit(batch, size)) is not None and again is None:
            problem = ValueError(f"{self.who}: {unfit}")
        elif self.sample_loss is None:
            self._again = None if unfit is None else again
            told = self._lies_by_sample(session.seed, step, batch, size)
            if told == _MOVED:
                other = "" if step.module is session.module else f" of model={type(step.module).__name__}(...)"
                problem = LossNotVisible(
                    f"{self.who}: the loss values in the training_step{other} do not lie sample by sample: those of some"
                    f" samples changed as others of the {size} were replaced. Expected (B, T) values flattened with the batch"
                    f" first, and a loss of each sample that does not depend on the others'.{_ADVICE}"
                )
        every = agree(session, problem, told)
        if _SKIPPED not in every:
            self.checked = seen if _ALIKE in every else True

    def check_ahead(self, session: Session, step: Step, batch: Any, size: int) -> None:
        """Find out in the first step, before anything moves, what would be refused once losses are scored later in the run.

        One more forward pass on the first batch whose step returns a loss, and nothing after it.

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
        """Whether the loss values of samples stay as others are replaced, with dropout, batch statistics and low precision off.

        A time-major flatten, or tokens picked by a mask, would put values down to the wrong samples in silence.
        """
        every = [*step.module.modules()]
        for still in (every, [m for m in every if isinstance(m, _NormBase | _DropoutNd)]):
            try:
                with in_evaluation(still), unrounded():
                    stays = self._stays(seed, step, batch, size)
            except Exception:  # a step that cannot run in evaluation mode runs with these layers alone in it
                if still is not every:
                    raise
                stays = None
            if stays is not None:
                return stays
        return _TOLD  # not visible at all, which the step itself will tell

    def _stays(self, seed: int, step: Step, batch: Any, size: int) -> str | None:
        """Whether the loss values of one half stay as the other half is replaced; None where none are seen.

        Where the step draws random numbers even so, other samples may get other draws, and nothing can be told. Nor can it
        where the values of the half that is replaced hardly move: they would not show among those of other samples.
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
        """The batch with these of its samples, or made anew of them with what the data set draws alike."""
        if self._again is None:
            return select(batch, index, size)
        with rng.keyed(seed, self.who, "again"):
            return self._again(index.tolist())

    def _calls(self, step: Step, batch: Any, size: int) -> tuple[list[LossCall] | None, bool]:
        """The loss calls of the step, if they can be seen, and whether it skips the batch."""
        observed = ObserveLosses(size)

        def around(run: Proceed, batch: Any) -> Any:
            with observed:
                return run(batch)

        output = step.forward_only(batch, size, around, transform=False)
        seen = observed.problem is None and bool(observed.calls)
        return observed.calls if seen else None, loss_of(output) is None

    # -- every batch

    def score(self, step: Step, batch: Any, size: int) -> Scores:
        """The scores of a batch of ``size`` samples, by a forward pass of its own."""
        if self.sample_loss is None:
            around, read = self.reading(step, size)
            step.forward_only(batch, size, around)
            return read()
        return self._told(self.sample_loss, step, batch, size)

    def reading(self, step: Step, size: int) -> tuple[Around, Callable[[], Scores]]:
        """What stands around the user's step to see its losses, and the scores once it has run."""
        observed = ObserveLosses(size, bounds=self.bounds)
        losses: list[Tensor | None] = []

        def around(run: Proceed, batch: Any) -> Any:
            with observed:
                output = run(batch)
            losses.append(loss_of(output))
            return output

        def read() -> Scores:
            loss, calls = next(iter(losses), None), observed.calls
            if loss is None:  # the user's step skips this batch
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
        """The scores, with a problem where one of them is nan or infinite: choosing among them would hide it."""
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
                f" {step.global_step} steps) is nan or infinite; expected finite losses, because choosing among the"
                " samples would hide it. Look at these samples, at the learning rate and at the precision."
            )
        )


def _unfit(batch: Any, size: int) -> str | None:
    try:
        check_indexed(batch, size)
    except ValueError as error:
        return str(error)
    return None


def _rows(values: Tensor, size: int) -> Tensor:
    """Values of samples that a link may have made into several each, shape (size, how many)."""
    if len(values) % size:
        raise LossNotVisible(f"sample_loss returned {len(values)} losses, which do not split over {size} samples.")
    return values.float().reshape(size, -1)


def _on_cpu(losses: Tensor, means: Tensor, bounds: Tensor | None) -> Scores:
    """The three in one transfer."""
    together = torch.stack([losses, means] if bounds is None else [losses, means, bounds]).detach().cpu().double()
    return Scores(together[0], together[1], None if bounds is None else together[2])


def _moved(before: list[LossCall], after: list[LossCall] | None, samples: Tensor) -> float:
    """The share of the loss values of ``samples`` that are others than before, of those that count, in the call with most."""
    if after is None or len(after) != len(before):
        return 1.0
    shares = [0.0]
    for a, b in zip(before, after, strict=True):
        index = samples.to(a.rows.device)
        if a.rows.shape == b.rows.shape:
            old, new, counts = a.rows[index], b.rows[index], (a.counted[index] != 0) | (b.counted[index] != 0)
        else:  # cut to another length, or tokens picked: sums tell them apart
            old, new = torch.stack([a.sums, a.counts])[:, index], torch.stack([b.sums, b.counts])[:, index]
            counts = torch.ones_like(old, dtype=torch.bool)
        other = ((old - new).abs() > 1e-3 * (1 + old.abs())) & counts
        shares.append(int(other.sum()) / max(int(counts.sum()), 1))
    return max(shares)
