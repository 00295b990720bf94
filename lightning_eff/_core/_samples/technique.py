"""The base class of techniques that choose the samples of an epoch."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._samples.epochs import EpochsOfRun
from lightning_eff._core._targets.calls import TargetCall, mixed
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import num_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique


@dataclass(frozen=True)
class Epoch:
    """An epoch that a technique chooses samples for.

    Attributes:
        number: the number of epochs before it.
        order: the indices that the user's loader would yield on all ranks, in their order, shape (n,), long, on the CPU. If
            ``left`` is set, only those still to come.
        size: the number N of samples in the data set.
        left: None when an epoch begins. In mid-epoch, after :meth:`SampleChooser.choose_again`, the number of samples to
            choose.
    """

    number: int
    order: Tensor
    size: int
    left: int | None = None


@dataclass(frozen=True)
class Choice:
    """A technique's choice of samples.

    Attributes:
        indices: the indices of the data set in the order of use, shape (m,), possibly with repeats.
        weights: the factors of the samples' losses before the mean, shape (m,), >= 0. None leaves the loss unchanged.
        sizes: the number of samples of each batch over all ranks in turn, for a number of batches that is a multiple of the
            ranks, and without weights. None leaves the sizes to the user's loader.
    """

    indices: Tensor | Sequence[int]
    weights: Tensor | Sequence[float] | None = None
    sizes: Sequence[int] | None = None


class SampleChooser(Technique):
    """A technique that chooses the samples of a map-style data set, when an epoch begins or at any step.

    A subclass implements :meth:`choose`, which must return the same on all ranks: it draws from ``session.generator``, and
    keeps what it learned about samples in :class:`SampleScores`. The choice is divided over the ranks like by
    ``DistributedSampler`` and cut into batches of the user's loader, with its workers. Lightning's counts of the epoch
    follow it. A checkpoint holds the choice, so a run resumes exactly in mid-epoch. The user's sampler is iterated when the
    epoch begins, so it draws its random numbers slightly earlier than in a plain run.

    ``session.sample_indices`` and ``session.sample_weights`` are the samples of a step and their weights. With
    ``wants_losses``, :meth:`on_losses` gets each sample's loss from the training pass. With ``wants_gradients``,
    :meth:`on_gradients` gets its gradient at the input of the loss.

    Class attributes, in addition to those of :class:`Technique`:
        wants_losses: whether :meth:`on_losses` is called.
        wants_gradients: whether :meth:`on_gradients` is.

    Attributes:
        labels: the names or positions of the labels in the batch, for batches where they are not found.
    """

    wants_losses: ClassVar[bool] = False
    wants_gradients: ClassVar[bool] = False
    labels: Sequence[str | int] | None = None

    _epochs: EpochsOfRun | None = None
    _targets: Targets | None = None

    @abstractmethod
    def choose(self, epoch: Epoch) -> Choice | None:
        """Choose the samples of ``epoch``, the same on all ranks, or return None for the user's own."""

    def on_losses(self, indices: list[int], losses: Tensor) -> None:
        """Get the mean loss of each sample of a training step, shape (B,), float32, detached, on the step's device."""

    def on_gradients(self, indices: list[int], norms: Tensor, sums: Tensor) -> None:
        """Get the gradient of each sample's ``f_i`` at the input of the loss, such as the logits, in a training step.

        The step's loss without weights is ``(1/B) sum_i f_i``. All tensors are detached.

        Args:
            indices: the data set indices of the batch's B samples.
            norms: the norm of each sample's gradient, shape (B,), float32.
            sums: the sum over a sample's rows (its tokens), which is the gradient of the last layer's bias, shape (B, C).
        """

    def choose_again(self) -> None:
        """Choose the rest of the running epoch again, between steps, the same on all ranks.

        Batches that worker processes have begun to load stay. :meth:`choose` gets the number of samples ``left`` and must
        choose that many.
        """
        assert self._epochs is not None, "choose_again is called within a fit"
        self._epochs.choose_again()

    @override
    def on_open(self, session: Session) -> None:
        if session.fitting:
            self._epochs = EpochsOfRun(session, self._choose, who=type(self).__name__)
            self._targets = Targets(session, who=type(self).__name__, labels=self.labels)
            session.chain.add(Stage.REWEIGHT, self._reweigh)

    @override
    def detach(self, session: Session) -> None:
        self._epochs = self._targets = None

    def _choose(self, number: int, order: Tensor, size: int, left: int | None) -> Any:
        choice = self.choose(Epoch(number, order, size, left))
        if choice is None:
            return None
        indices = torch.as_tensor(choice.indices).cpu()
        weights = None if choice.weights is None else torch.as_tensor(choice.weights).detach().cpu().float()
        return (indices, weights) if choice.sizes is None else (indices, weights, [int(n) for n in choice.sizes])

    def _reweigh(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        session, who = self.session, type(self).__name__
        indices, weights = session.sample_indices, session.sample_weights
        if weights is not None and bool((weights == 1).all()):
            weights = None
        looks = self.wants_losses or self.wants_gradients
        if weights is None and not looks and not session.loaders.weighted:
            return proceed(batch)
        if indices is None:
            raise ValueError(
                f"{who}: it is not known which samples a batch has, because {session.loaders.why_unknown}. Use a"
                f" torch.utils.data.DataLoader over a data set with __getitem__ and __len__, or remove {who}."
            )
        size = num_samples(batch)
        if not isinstance(indices, list) or len(indices) != size:
            got = len(indices) if isinstance(indices, list) else 1
            raise ValueError(
                f"{who}: the loader gave {got} indices and the step has {size} samples, so they cannot be matched. Give the"
                " loader a batch_size and a collate_fn that makes one sample of each index, and remove techniques that choose"
                " among a batch's samples."
            )
        parts: list[tuple[Tensor, Tensor]] = []
        gradients: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        weigh = None if weights is None else mixed(weights)

        def change(call: TargetCall) -> Tensor:
            if self.wants_losses and not done:
                parts.append(_by_sample(call, size))
            if self.wants_gradients and not done:
                at, share = session.part[0], session.share_of_part
                number = sum(part == at for part, _ in gradients)
                gradients[at, number] = _gradients(call, size, share)
            return call.plain() if weigh is None else weigh(call)

        done = False
        assert self._targets is not None
        output = self._targets.run(step, batch, proceed, change)
        done = True  # gradient checkpointing may run calls again, which have been seen
        # sum_k s_ik / n_ik
        losses = torch.stack([s / n.clamp(min=1e-12) for s, n in parts]).sum(dim=0) if parts else None
        if looks:
            losses, found = session.from_loss((losses, _together(gradients)))
            if losses is not None:
                self.on_losses(indices, losses)
            if found is not None:
                self.on_gradients(indices, *found)
        return output


def _together(gradients: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Combine the parts' loss calls into the norms of samples' gradients, (B,), and their concatenated sums."""
    if not gradients:
        return None
    squares = torch.stack([square for square, _ in gradients.values()]).sum(dim=0)
    sums: dict[int, Tensor] = {}
    for (_, number), (_, mine) in gradients.items():
        sums[number] = sums[number] + mine if number in sums else mine
    return squares.sqrt(), torch.cat([*sums.values()], dim=1)


def _by_sample(call: TargetCall, size: int) -> tuple[Tensor, Tensor]:
    """Sum each sample's losses and their counts, each (B,)."""
    losses = call.losses().detach().float().flatten()
    samples, counted = call.element_samples.flatten().to(losses.device), call.counted().detach().float().flatten()
    known = samples >= 0
    zeros = torch.zeros(size, device=losses.device, dtype=torch.float32)
    at = samples[known]
    return zeros.index_add(0, at, losses[known]), zeros.index_add(0, at, counted[known])


def _gradients(call: TargetCall, size: int, share: float) -> tuple[Tensor, Tensor]:
    """Compute the squared norm of each sample's gradient at the call's input, (B,), and the sum over its rows, (B, C).

    Args:
        call: a loss call on the batch or a part of it.
        size: the number B of samples.
        share: the factor of the part's loss in the batch's loss.
    """
    with torch.enable_grad():
        z = call.input.detach().requires_grad_()
        losses = replace(call, arguments={**call.arguments, "input": z}).losses()
        (gradient,) = torch.autograd.grad(losses.sum(), z)
    counted = 1.0 if call.reduction == "sum" else call.counted().detach().float().sum().clamp(min=1e-12)
    samples = call.element_samples.to(z.device).flatten()
    if call.of_classes:
        rows = gradient.movedim(call._class_dim, -1).flatten(0, -2)
    else:
        rows = gradient.expand(losses.shape).reshape(len(losses), -1) if losses.ndim else gradient.reshape(1, 1)
        samples = samples.reshape(len(rows), -1)[:, 0]
    rows = rows.float() * (share * size / counted)
    known = samples >= 0
    at = samples[known]
    squares = torch.zeros(size, device=z.device, dtype=torch.float32).index_add(0, at, rows[known].square().sum(dim=1))
    sums = torch.zeros(size, rows.shape[1], device=z.device, dtype=torch.float32).index_add(0, at, rows[known])
    return squares, sums
