"""The engine of techniques that make samples of several: the loss becomes that on all of their labels, in the same pass."""

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._targets.calls import Change, TargetCall, mixed
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import tensors
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff.data.augmentation._arguments import check_names
from lightning_eff.data.augmentation._engine import Augmentation, floating_images, replaced

_OF_CLASSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


def draw_shares(alpha: float, count: int, rng: np.random.Generator) -> Tensor:
    """``lambda ~ Beta(alpha, alpha)``, (count,), float64."""
    return torch.from_numpy(rng.beta(alpha, alpha, count))


def no_classes(who: str, path: str, shape: tuple[int, ...], fn: str) -> str:
    """What is said of labels that are targets of another loss."""
    return (
        f"{who}: the labels {path or 'in the batch'} {shape} are targets of F.{fn}, and so no classes; expected them in"
        f" {', '.join(f'F.{name}' for name in _OF_CLASSES)}. Say by labels= which are classes, or take the technique out."
    )


def key_of(path: str) -> str | int:
    """The name or position by which ``keys=`` finds the tensor at a path."""
    last = re.findall(r"\['([^']*)'\]|\.(\w+)|\[(\d+)\]", path)
    if not last:
        return 0
    names = [a or b for a, b, _ in last if a or b]
    return names[-1] if names else int(last[0][2])


def only_classes(change: Change, *, who: str) -> Change:
    """``change``, refusing loss calls whose targets are no classes."""

    def checked(call: TargetCall) -> Tensor:
        if call.fn.__name__ not in _OF_CLASSES:
            raise ValueError(no_classes(who, call.label, tuple(call.shape), call.fn.__name__))
        return change(call)

    return checked


def check_labels(labels: dict[str, Tensor], *, who: str, by_sample: bool = False) -> None:
    """Raise ``ValueError`` unless labels are classes: integers, or numbers in [0, 1].

    Args:
        labels: by their paths.
        who: the technique's name, for messages.
        by_sample: each sample is to have one label, (B,), or a number for each class, (B, C).
    """
    for path, y in labels.items():
        got = f"{who}: the labels {path or 'in the batch'} {tuple(y.shape)} {str(y.dtype)[6:]}"
        if y.is_complex() or (y.is_floating_point() and y.numel() and not bool(((y >= 0) & (y <= 1)).all())):
            raise ValueError(
                f"{got} are no classes; expected integers, or probabilities in [0, 1]. Say by labels= which tensor holds the"
                " classes, or take the technique out."
            )
        if by_sample and not (y.ndim == 1 or (y.ndim == 2 and y.is_floating_point())):
            raise ValueError(
                f"{got} are several of each sample; expected one, (B,), or a probability for each class, (B, C), because an"
                " area's share says nothing of single pixels' labels. Take the technique out, or mix in the data set."
            )


class Mixing(Augmentation):
    """Trains on mixtures of each sample with another of its micro-batch, or several, and on the labels of all of them.

    The step's loss on labels ``y`` becomes ``lambda L(y) + (1 - lambda) L(y')`` for each sample, with ``y'`` the labels of
    the one that was mixed in, or ``sum_k lambda_k L(y_k)`` of several: for cross-entropy and binary cross-entropy that is the
    loss on the mixed target, exactly. Where :attr:`larger_first`, roles are such that ``lambda`` is at least one half: what
    reads the batch's labels sees those of the larger share.

    Where several techniques mix, each batch is mixed by one of them: of n, each n batches of the run in turn go once to each,
    in an order that is drawn; of an epoch, where epochs have no length.

    Class attributes, beside those of :class:`Augmentation`:
        by_sample: labels must be one of each sample.
        larger_first: each sample's own share is at least one half.

    Attributes:
        labels: names or positions of the labels in the batch; None looks for them.
    """

    stage: ClassVar[Stage] = Stage.MIX
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    order: ClassVar[int] = 1
    by_sample: ClassVar[bool] = True
    larger_first: ClassVar[bool] = True

    def __init__(
        self, *, prob: float, until: float, keys: Sequence[str | int] | None, labels: Sequence[str | int] | None
    ) -> None:
        super().__init__(prob=prob, until=until, keys=keys)
        check_names(labels, who=type(self).__name__, name="labels")
        self.labels = None if labels is None else list(labels)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._told = False
        self._looked_at = -1  # the step in which it was last looked at what else reaches the loss

    # -- what subclasses say

    @property
    def mixes_inputs(self) -> bool:
        """Whether tensors of the batch are mixed, beside which others may be left as they are."""
        return True

    def inputs(self, batch: Any, labels: dict[str, Tensor]) -> list[Tensor]:
        """The tensors of the batch that are mixed.

        Raises:
            ValueError: if there are none, with what was found.
        """
        return floating_images(batch, self.keys, who=type(self).__name__, beside=list(labels.values()))

    def entrances(self, module: nn.Module) -> list[nn.Module]:
        """The submodules whose outputs are mixed within the network; labels may be ids that go in before them."""
        return []

    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        """Mixtures, and each sample's own share ``lambda`` in them, (B,); at least one half where :attr:`larger_first`.

        What mixes more than two samples says :meth:`compose` instead.

        Args:
            inputs: what :meth:`inputs` gives, each (B, ...).
            partner: the sample that each is mixed with, (B,), on the CPU.
            generator: of this micro-batch.
        """
        raise NotImplementedError

    def compose(self, inputs: list[Tensor], size: int, generator: Generator) -> tuple[list[Tensor], Tensor, Tensor]:
        """Mixtures, the samples that are mixed into each, and the shares: by default of one, which is drawn.

        Args:
            inputs: what :meth:`inputs` gives, each (B, ...).
            size: B.
            generator: of this micro-batch.

        Returns:
            The mixtures, each (B, ...); the other samples, (B,) or of several (B, K - 1), on the CPU; each sample's own share,
            (B,), or its own and those of the others, (B, K).
        """
        partner = torch.randperm(size, generator=generator)
        mixtures, share = self.mix(inputs, partner, generator)
        return mixtures, partner, share

    def others(self, labels: dict[str, Tensor], partner: Tensor) -> dict[str, list[Tensor]]:
        """The labels beside each sample's own, by path, from what :meth:`compose` gave as the other samples."""
        columns = partner.reshape(len(partner), -1).unbind(dim=1)
        return {path: [y.index_select(0, column.to(y.device)) for column in columns] for path, y in labels.items()}

    def weighing(self, share: Tensor) -> Change:
        """What becomes of a loss call on labels, from what :meth:`compose` gave as shares.

        ``lambda L(y) + (1 - lambda) L(y')`` from (B,), and ``sum_k lambda_k L(y_k)`` from (B, K).
        """
        return mixed(share, 1 - share) if share.ndim == 1 else mixed(*share.unbind(dim=1))

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._targets = Targets(
            session, type(self).__name__, self.labels, scored=True, alone="step", entrances=self.entrances
        )

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        who, targets = type(self).__name__, self._targets
        labels = targets.labels(step, batch)
        if not labels:  # the step skips this batch
            self._note(0.0)
            return proceed(batch)
        self._look_once(lambda: self._look(step, batch, labels))
        self._look_for_rest(step, batch, labels)
        made: tuple[Any, Tensor, Tensor] | None = None
        if self._acts() and self._its_turn(step):
            with self._timed():
                made = self._mixture(step, batch, labels)
        if made is None:
            self._note(0.0)
            # all ranks look at the loss at once, and one of them may have drawn to leave this batch alone
            change = only_classes(TargetCall.plain, who=who)
            return proceed(batch) if targets.checked else targets.run(step, batch, proceed, change)
        mixture, partner, share = made
        others = self.others(labels, partner)
        output = targets.run(step, mixture, proceed, only_classes(self.weighing(share), who=who), others)
        mean = float((share if share.ndim == 1 else share[:, 0]).mean())
        self._note(0.0 if output is None else 1.0 - mean)  # a resumed run finds no labels in a step that it begins with
        if targets.compared and not self._told:
            self._told = True
            larger = "the larger" if self.larger_first else "not always the larger"
            rank_zero_warn(
                f"{who}: training_step compares the labels with what it computed, as a metric does. It reads each sample's own"
                f" label, whose share of the mixture is {larger}, so such a figure of training batches is too low; validation"
                " is not mixed."
            )
        return output

    def _look_for_rest(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> None:
        """Refuse batches of which the loss sees a part that is not mixed, such as columns of categories beside numbers.

        Looked at in the first step, and in the second, fourth, eighth and so on where the batch has such tensors: those of
        some batches are alike for all samples. Named ``keys`` say that the rest shall stay as it is.
        """
        now = step.global_step
        if self.keys is not None or not self.mixes_inputs or now == self._looked_at:
            return
        if self._looked_at >= 0 and now.bit_count() != 1:
            return
        self._looked_at = now

        def look() -> None:
            inputs, size = self._sized(batch, labels)
            held = {id(t) for t in (*inputs, *labels.values())}
            named = {path: t for path, t in tensors(batch) if t.ndim > 0 and len(t) == size and id(t) not in held}
            rest = self._targets.reaching(step, batch, list(named))
            if rest:
                listed = ", ".join(
                    f"{path} {tuple(named[path].shape)} {str(named[path].dtype)[6:]}" for path in rest[:5]
                )
                mixed_paths = [path for path, t in tensors(batch) if id(t) in {id(x) for x in inputs}]
                keys = [key_of(path) for path in mixed_paths]
                raise ValueError(
                    f"{type(self).__name__}: the loss also comes of {listed}, which would not be mixed with the rest of each"
                    f" sample. Set keys={keys} if these tensors shall stay as they are, or remove {type(self).__name__}."
                )

        on_all_ranks(self.session, look)

    def _look(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> None:
        who = type(self).__name__
        for path in labels:
            for name in sorted(self._targets.functions.get(path, set()) - set(_OF_CLASSES)):
                raise ValueError(no_classes(who, path, tuple(labels[path].shape), name))
        ids = {id(y) for y in labels.values()}
        images = [path for path, y in labels.items() if y.ndim > 2 and y.is_floating_point()]
        if images and all(id(t) in ids for _, t in tensors(batch) if t.is_floating_point() and t.ndim > 1):
            raise ValueError(
                f"{who}: {images[0] or 'the batch'} is both the input and the target of the loss, as in an autoencoder or a"
                f" diffusion model, so there are no labels to mix. Remove {who}."
            )
        self._sized(batch, labels)
        check_labels(labels, who=type(self).__name__, by_sample=self.by_sample)
        self.look(step, batch)

    def _sized(self, batch: Any, labels: dict[str, Tensor]) -> tuple[list[Tensor], int]:
        """The inputs, and the number of samples that they and the labels have."""
        inputs = self.inputs(batch, labels)
        sizes = {len(t) for t in (*inputs, *labels.values())}
        if len(sizes) > 1:
            held = ", ".join(f"{path or 'the batch'} {tuple(t.shape)}" for path, t in tensors(batch))
            raise ValueError(
                f"{type(self).__name__}: what is mixed and its labels are of {sorted(sizes)} samples; expected as many. The"
                f" batch holds {held}. Say by keys= and labels= which are meant."
            )
        return inputs, sizes.pop()

    def _its_turn(self, step: Step) -> bool:
        """Whether this batch is for this technique, of those that mix; the same on all ranks."""
        names = sorted(type(t).__name__ for t in self.session.working if isinstance(t, Mixing))
        if len(names) == 1:
            return True
        epoch, length = self.session.trainer.current_epoch, self.session.trainer.num_training_batches
        # epochs may be shorter than there are techniques
        at, epoch = (step.batch_idx, epoch) if math.isinf(length) else (int(epoch * length) + step.batch_idx, 0)
        generator = self.session.generator("whose turn", epoch, at // len(names))
        order = torch.randperm(len(names), generator=generator)
        return names[int(order[at % len(names)])] == type(self).__name__

    def _mixture(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor] | None:
        """The batch of mixtures, the other samples in them and the shares; None where it is left alone."""
        generator = self.generator(step)
        acts = torch.rand((), generator=generator, dtype=torch.float32) < self.prob
        inputs, size = self._sized(batch, labels)
        if not acts or size < 2:
            return None
        mixtures, partner, share = self.compose(inputs, size, generator)
        made = {id(t): m for t, m in zip(inputs, mixtures, strict=True)}
        return replaced(batch, made), partner, share
