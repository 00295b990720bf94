"""The base class of techniques that say which samples an epoch has."""

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
    """What a technique is told of the epoch that it chooses samples for.

    Attributes:
        number: epochs done before it.
        order: the data set's indices that the user's loader would yield, of all ranks, in the order in which they would be
            seen, shape (n,), long, on the CPU; where ``left`` is set, those that are still to come.
        size: the number N of the data set's samples.
        left: None as an epoch begins; in mid-epoch, after :meth:`SampleChooser.choose_again`, how many are to be chosen.
    """

    number: int
    order: Tensor
    size: int
    left: int | None = None


@dataclass(frozen=True)
class Choice:
    """What a technique chose.

    Attributes:
        indices: of the data set, in the order in which they are to be seen, shape (m,); one may come several times.
        weights: what the loss of each is multiplied with before a mean is taken, shape (m,), >= 0; None leaves the loss alone.
        sizes: how many samples each batch of all ranks has, in turn; their number is one that the ranks divide, and
            there are no weights. None leaves that to the user's loader.
    """

    indices: Tensor | Sequence[int]
    weights: Tensor | Sequence[float] | None = None
    sizes: Sequence[int] | None = None


class SampleChooser(Technique):
    """A technique that says, as an epoch begins or at any step, which samples of a map-style data set it has.

    A subclass says it in :meth:`choose`, from which all ranks must get the same: what it draws, it draws from
    ``session.generator``, and what it learnt of samples it keeps in :class:`SampleScores`. The choice is divided over the
    ranks as by ``DistributedSampler`` and cut into the batches of the user's loader, with its workers, and Lightning's
    counts of the epoch follow it. A checkpoint holds it, so that a resumed run goes on in mid-epoch to the bit. The user's
    sampler is gone through as the epoch begins, and so draws its random numbers a moment earlier than in a plain run.

    Which samples a step has is ``session.sample_indices``, and with which weights ``session.sample_weights``. With
    ``wants_losses`` each sample's loss comes to :meth:`on_losses` from the training pass itself, and with
    ``wants_gradients`` its gradient at the loss's input to :meth:`on_gradients`.

    Class attributes, beside those of :class:`Technique`:
        wants_losses: whether :meth:`on_losses` is called.
        wants_gradients: whether :meth:`on_gradients` is.

    Attributes:
        labels: names or positions of the labels in the batch, where looking does not tell which they are.
    """

    wants_losses: ClassVar[bool] = False
    wants_gradients: ClassVar[bool] = False
    labels: Sequence[str | int] | None = (
        None  #: names or positions of the labels in the batch, where looking does not tell
    )

    _epochs: EpochsOfRun | None = None
    _targets: Targets | None = None

    @abstractmethod
    def choose(self, epoch: Epoch) -> Choice | None:
        """The samples of ``epoch``, the same on all ranks; None leaves the user's own."""

    def on_losses(self, indices: list[int], losses: Tensor) -> None:
        """The mean loss of each sample of a training step, shape (B,), float32, without a graph, on the step's device."""

    def on_gradients(self, indices: list[int], norms: Tensor, sums: Tensor) -> None:
        """What each sample's ``f_i`` has for a gradient at the loss's input, such as the logits, of a training step.

        The step's loss without weights is ``(1/B) sum_i f_i``. Nothing here has a graph.

        Args:
            indices: of the data set, of the batch's B samples.
            norms: over all that a sample has there, shape (B,), float32.
            sums: over a sample's rows (its tokens), which is the gradient at the bias of the last map, shape (B, C).
        """

    def choose_again(self) -> None:
        """Choose anew, between steps, what is not handed out yet of the running epoch; the same on all ranks.

        Batches that worker processes have begun to load stay. :meth:`choose` is told how many are ``left`` and must give
        so many.
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
                f"{who}: it is not known which samples a batch holds, because {session.loaders.why_unknown}. Pass a"
                f" torch.utils.data.DataLoader over a dataset with __getitem__ and __len__, or remove {who}."
            )
        size = num_samples(batch)
        if not isinstance(indices, list) or len(indices) != size:
            got = len(indices) if isinstance(indices, list) else 1
            raise ValueError(
                f"{who}: the loader gave {got} indices and the step has {size} samples, so it cannot be told which is which."
                " Give the loader a batch_size and a collate_fn that makes one sample of each index, and take out techniques"
                " that choose among a batch's samples."
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
        done = True  # what gradient checkpointing runs again has been seen
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
    """Norms of samples' gradients, (B,), and their sums beside one another, from those of each part's loss calls."""
    if not gradients:
        return None
    squares = torch.stack([square for square, _ in gradients.values()]).sum(dim=0)
    sums: dict[int, Tensor] = {}
    for (_, number), (_, mine) in gradients.items():
        sums[number] = sums[number] + mine if number in sums else mine
    return squares.sqrt(), torch.cat([*sums.values()], dim=1)


def _by_sample(call: TargetCall, size: int) -> tuple[Tensor, Tensor]:
    """The sum of each sample's losses, and what they count, each (B,)."""
    losses = call.losses().detach().float().flatten()
    samples, counted = call.element_samples.flatten().to(losses.device), call.counted().detach().float().flatten()
    known = samples >= 0
    zeros = torch.zeros(size, device=losses.device, dtype=torch.float32)
    at = samples[known]
    return zeros.index_add(0, at, losses[known]), zeros.index_add(0, at, counted[known])


def _gradients(call: TargetCall, size: int, share: float) -> tuple[Tensor, Tensor]:
    """The squared norm of each sample's gradient at the call's input, (B,), and the sum over its rows, (B, C).

    Args:
        call: on the batch, or on a part of it.
        size: B.
        share: what the part's loss is multiplied by in the batch's.
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
