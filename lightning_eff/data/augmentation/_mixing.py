"""The engine of techniques that mix samples: one pass computes the loss on the labels of all samples in a mixture."""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
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
from lightning_eff._core.technique import Technique
from lightning_eff.data.augmentation._engine import Augmentation, floating_images, replaced

_OF_CLASSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


def draw_shares(alpha: float, count: int, rng: np.random.Generator) -> Tensor:
    """Draw ``lambda ~ Beta(alpha, alpha)``: (count,), float64."""
    return torch.from_numpy(rng.beta(alpha, alpha, count))


def with_settings(technique: Technique, **changes: Any) -> Technique:
    """Return a technique with the same arguments, except for ``changes``."""
    names = inspect.signature(type(technique)).parameters
    return type(technique)(**{**{name: getattr(technique, name) for name in names}, **changes})


def no_classes(who: str, path: str, shape: tuple[int, ...], fn: str) -> str:
    """Return the message about labels that are targets of a loss without classes."""
    return (
        f"{who}: the labels {path or 'in the batch'} {shape} are targets of F.{fn}, so they are no classes. Name the labels of"
        f" {', '.join(f'F.{name}' for name in _OF_CLASSES)} with labels=, or remove {who}."
    )


def key_of(path: str) -> str | int:
    """Return the name or position with which ``keys=`` finds the tensor at a path."""
    last = re.findall(r"\['([^']*)'\]|\.(\w+)|\[(\d+)\]", path)
    if not last:
        return 0
    names = [a or b for a, b, _ in last if a or b]
    return names[-1] if names else int(last[0][2])


def only_classes(change: Change, *, who: str) -> Change:
    """Return ``change`` with a check that the targets of the loss call are classes."""

    def checked(call: TargetCall) -> Tensor:
        if call.fn.__name__ not in _OF_CLASSES:
            raise ValueError(no_classes(who, call.label, tuple(call.shape), call.fn.__name__))
        return change(call)

    return checked


def check_labels(labels: dict[str, Tensor], *, who: str, by_sample: bool = False) -> None:
    """Raise ``ValueError`` unless labels are classes: integers, or numbers in [0, 1].

    Args:
        labels: the labels, by path.
        who: the technique's name, for messages.
        by_sample: require one label per sample, (B,), or one probability per class, (B, C).
    """
    for path, y in labels.items():
        got = f"{who}: the labels {path or 'in the batch'} {tuple(y.shape)} {str(y.dtype)[6:]}"
        if y.is_complex() or (y.is_floating_point() and y.numel() and not bool(((y >= 0) & (y <= 1)).all())):
            raise ValueError(
                f"{got} are no classes: they are neither integers nor probabilities in [0, 1]. Name the tensor of classes with"
                f" labels=, or remove {who}."
            )
        if by_sample and not (y.ndim == 1 or (y.ndim == 2 and y.is_floating_point())):
            raise ValueError(
                f"{got} are several per sample, and shares of areas do not apply to labels of pixels. Give one label per"
                f" sample, (B,), or one probability per class, (B, C), or remove {who}."
            )


class Mixing(Augmentation):
    """Mixes each sample with one or more others of its micro-batch, and trains on the labels of all of them.

    The loss of a sample becomes ``lambda L(y) + (1 - lambda) L(y')``, where ``y'`` are the labels of the other sample. For
    several others it is ``sum_k lambda_k L(y_k)``. For cross-entropy and binary cross-entropy this equals the loss on the mixed
    target. With :attr:`larger_first`, ``lambda`` is at least one half, so code that reads the batch's labels sees those of the
    larger share.

    If several techniques mix, each batch is mixed by one of them. Each group of n consecutive batches of the run goes to the n
    techniques in a random order. If epochs have no length, the groups are those of an epoch.

    Class attributes, in addition to those of :class:`Augmentation`:
        by_sample: whether each sample must have exactly one label.
        larger_first: whether each sample's own share is at least one half.

    Attributes:
        alpha: the parameter of the distribution of ``lambda``.
        per_sample: whether each sample has draws of its own.
        labels: names or positions of the labels in the batch. None looks for them.
    """

    constraints = (
        "needs automatic optimization, floating-point images (B, C, H, W), one class label per image and a loss of"
        " torch.nn.functional"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "it would compare a mixture with a different mixture of earlier epochs"
    }
    stage = Stage.MIX
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    order = 1
    by_sample: ClassVar[bool] = True
    larger_first: ClassVar[bool] = True

    def __init__(
        self,
        *,
        alpha: float,
        prob: float,
        until: float,
        keys: Sequence[str | int] | None,
        labels: Sequence[str | int] | None,
        per_sample: bool = True,
    ) -> None:
        super().__init__(prob=prob, until=until, keys=keys)
        self.alpha = alpha
        self.per_sample = per_sample
        self.labels = labels

    @override
    def _reset(self) -> None:
        super()._reset()
        self._told = False
        self._layout: Any = None  # the layout of the batches for which the next two were found
        self._places: list[int] = []
        self._size = 0
        self._looked_at = -1  # the step of the last check of what else reaches the loss

    # -- for subclasses

    @property
    def mixes_inputs(self) -> bool:
        """Whether tensors of the batch are mixed, so that the others must not matter to the loss."""
        return True

    def inputs(self, batch: Any, labels: dict[str, Tensor]) -> list[Tensor]:
        """Return the tensors of the batch that are mixed. The choice depends on paths, shapes and types, and not on values.

        Raises:
            ValueError: if there are none. The message lists the tensors of the batch.
        """
        return floating_images(batch, self.keys, who=type(self).__name__, beside=list(labels.values()))

    def entrances(self, module: nn.Module) -> list[nn.Module]:
        """Return the submodules whose outputs are mixed. Labels may be ids that enter the network before them."""
        return []

    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        """Return the mixtures, and each sample's own share ``lambda``, (B,), at least one half with :attr:`larger_first`.

        A technique that mixes more than two samples overrides :meth:`compose` instead.

        Args:
            inputs: the tensors of :meth:`inputs`, each (B, ...).
            partner: the index of the other sample in each mixture, (B,), on the CPU.
            generator: the generator of this micro-batch.
        """
        raise NotImplementedError

    def compose(self, inputs: list[Tensor], size: int, generator: Generator) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the mixtures, the other samples in each, and the shares. The default mixes two samples, drawn at random.

        Args:
            inputs: the tensors of :meth:`inputs`, each (B, ...).
            size: B.
            generator: the generator of this micro-batch.

        Returns:
            The mixtures, each (B, ...). The indices of the other samples, (B,) or (B, K - 1), on the CPU. Each sample's own
            share, (B,), or its own share followed by those of the others, (B, K).
        """
        partner = torch.randperm(size, generator=generator)
        mixtures, share = self.mix(inputs, partner, generator)
        return mixtures, partner, share

    def others(self, labels: dict[str, Tensor], partner: Tensor) -> dict[str, list[Tensor]]:
        """Return the labels of the other samples, by path, for the indices that :meth:`compose` returned."""
        columns = partner.reshape(len(partner), -1).unbind(dim=1)
        return {path: [y.index_select(0, column.to(y.device)) for column in columns] for path, y in labels.items()}

    def weighing(self, share: Tensor) -> Change:
        """Return the change of a loss call, for the shares that :meth:`compose` returned.

        Shares (B,) give ``lambda L(y) + (1 - lambda) L(y')``, shares (B, K) give ``sum_k lambda_k L(y_k)``.
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
            # all ranks check the loss in the same step, even those that drew to leave this batch unchanged
            change = only_classes(TargetCall.plain, who=who)
            return proceed(batch) if targets.checked else targets.run(step, batch, proceed, change)
        mixture, partner, share = made
        others = self.others(labels, partner)
        output = targets.run(step, mixture, proceed, only_classes(self.weighing(share), who=who), others)
        mean = float((share if share.ndim == 1 else share[:, 0]).mean())
        self._note(0.0 if output is None else 1.0 - mean)  # a resumed run finds no labels in its first step
        if targets.compared and not self._told:
            self._told = True
            larger = "the larger" if self.larger_first else "not always the larger"
            rank_zero_warn(
                f"{who}: training_step compares the labels with its output, as a metric does. It sees only each sample's own"
                f" label, whose weight in the mixture is {larger}, so training metrics are too low. Rely on validation metrics,"
                " which are computed without mixing."
            )
        return output

    def _look_for_rest(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> None:
        """Refuse batches with a part that reaches the loss unmixed, such as columns of categories.

        The check runs in the first step, and again in the second, fourth, eighth and so on: in a single batch, such a tensor
        may happen to be equal for all samples. With explicit ``keys`` the rest stays unmixed, and nothing is checked.
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
                    f"{type(self).__name__}: the loss also depends on {listed}, which would not be mixed with the rest of each"
                    f" sample. Set keys={keys} to leave these tensors unmixed, or remove {type(self).__name__}."
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
        """Return the inputs and the number of samples."""
        held = tensors(batch)
        if len({id(t) for _, t in held}) < len(held):  # a tensor has several paths
            return self._sized_anew(batch, labels)
        ids = {id(y) for y in labels.values()}
        layout = tuple((path, t.shape, t.dtype, id(t) in ids) for path, t in held)
        if self._layout == layout:
            return [held[at][1] for at in self._places], self._size
        inputs, size = self._sized_anew(batch, labels)
        places = {id(t): at for at, (_, t) in enumerate(held)}
        if all(id(t) in places for t in inputs):
            self._layout, self._places, self._size = layout, [places[id(t)] for t in inputs], size
        return inputs, size

    def _sized_anew(self, batch: Any, labels: dict[str, Tensor]) -> tuple[list[Tensor], int]:
        inputs = self.inputs(batch, labels)
        sizes = {len(t) for t in (*inputs, *labels.values())}
        if len(sizes) > 1:
            held = ", ".join(f"{path or 'the batch'} {tuple(t.shape)}" for path, t in tensors(batch))
            raise ValueError(
                f"{type(self).__name__}: the inputs and the labels differ in their number of samples, {sorted(sizes)}. Name the"
                f" right tensors with keys= and labels= (the batch holds {held})."
            )
        return inputs, sizes.pop()

    def _its_turn(self, step: Step) -> bool:
        """Return whether this technique mixes this batch, the same on all ranks."""
        names = sorted(type(t).__name__ for t in self.session.working if isinstance(t, Mixing))
        if len(names) == 1:
            return True
        epoch, length = self.session.trainer.current_epoch, self.session.trainer.num_training_batches
        # an epoch may have fewer batches than there are techniques
        at, epoch = (step.batch_idx, epoch) if math.isinf(length) else (int(epoch * length) + step.batch_idx, 0)
        generator = self.session.generator("whose turn", epoch, at // len(names))
        order = torch.randperm(len(names), generator=generator)
        return names[int(order[at % len(names)])] == type(self).__name__

    def _mixture(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor] | None:
        """Return the mixed batch, the other samples and the shares, or None to leave the batch unchanged."""
        generator = self.generator(step)
        acts = torch.rand((), generator=generator, dtype=torch.float32).item() < self.prob
        inputs, size = self._sized(batch, labels)
        if not acts or size < 2:
            return None
        mixtures, partner, share = self.compose(inputs, size, generator)
        made = {id(t): m for t, m in zip(inputs, mixtures, strict=True)}
        return replaced(batch, made), partner, share
