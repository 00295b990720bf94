"""The engine of all augmentations: when they act, their random draws, and their log."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._images.images import find_images
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.batches import map_tensors, tensors
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

_ON_PIXELS = re.compile(r"box|keypoint|landmark", re.IGNORECASE)
#: The control of techniques without a cheaper variant.
BASELINE = Control("the baseline without augmentation, trained for the same time")


def replaced(batch: Any, by: dict[int, Tensor]) -> Any:
    """Return a batch of the same structure, with the tensors of these ids replaced."""
    return map_tensors(batch, lambda t: by.get(id(t), t))


def floating_images(
    batch: Any, keys: Sequence[str | int] | None, *, who: str, beside: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return the images of a batch, each (B, C, H, W), all with the same B, H and W.

    Args:
        batch: tensors in a dict, tuple, list or dataclass.
        keys: names or positions of the images. None takes all 4-D floating-point tensors.
        who: the technique's name, for messages.
        beside: tensors that are not images, such as labels.

    Raises:
        ValueError: if there are no images, or if they are not floating point.
    """
    found = find_images(batch, keys, who=who, beside=[id(t) for t in beside])
    named = [(path, t) for path, t in tensors(batch) if id(t) in found.images]
    whole = [path or "the batch" for path, t in named if not t.is_floating_point()]
    if whole:
        raise ValueError(
            f"{who}: the images {', '.join(whole)} are uint8, so the result would be rounded. Convert them to normalised"
            " floating point in the data set or its collate_fn."
        )
    return list({id(t): t for _, t in named}.values())


def whole_images(batch: Any, keys: Sequence[str | int] | None, *, who: str) -> list[Tensor]:
    """Return the images of a batch, each (B, C, H, W), floating point or uint8, all with the same B, H and W.

    Args:
        batch: tensors in a dict, tuple, list or dataclass.
        keys: names or positions of the images. None takes all that :func:`find_images` finds.
        who: the technique's name, for messages.

    Raises:
        ValueError: if there are no images.
    """
    found = find_images(batch, keys, who=who)
    return list({id(t): t for _, t in tensors(batch) if id(t) in found.images}.values())


def check_nothing_on_pixels(batch: Any, keys: Sequence[str | int] | None, *, who: str, after: str, mend: str) -> None:
    """Raise ``ValueError`` if the batch holds masks, boxes or keypoints, which do not move with the pixels of its images.

    Args:
        batch: tensors in a dict, tuple, list or dataclass.
        keys: names or positions of the images, or None.
        who: the technique's name, for messages.
        after: what moves the pixels.
        mend: how to avoid it, as a sentence.
    """
    found = find_images(batch, keys, who=who)
    on_pixels = [path or "the batch" for path, t in tensors(batch) if id(t) in found.targets or _ON_PIXELS.search(path)]
    if on_pixels:
        raise ValueError(
            f"{who}: the batch holds {', '.join(on_pixels)}, which would no longer match the images after {after}. {mend}"
        )


def check_until(session: Session, *, who: str, until: float) -> None:
    """Raise ``ValueError`` if ``until`` is below 1 and the run has no end."""
    if until < 1.0 and not session.progress.limits():
        raise ValueError(
            f"{who}(until={until}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so there is no budget"
            " to take a fraction of. Set one of them, or until=1.0."
        )


class Augmentation(Technique):
    """Changes training batches on their device.

    Random draws depend only on the seed, the step, the micro-batch and the rank. So a resumed run draws the same as an
    uninterrupted one, and each rank draws differently. Batches of validation, test and prediction are not changed.

    Class attributes, in addition to those of :class:`Technique`:
        logged: the names of further figures that are logged. They are 0 at the start of each micro-batch.

    Attributes:
        prob: the probability that a micro-batch is changed.
        until: the fraction of the budget after which batches are left unchanged.
        keys: names or positions of the tensors that are changed. None looks for them.
    """

    saves = "no time per step: it regularises, for a better model after many epochs"
    stage = Stage.AUGMENT
    needs: ClassVar[Need] = Need.BATCH
    checkpointed = ("_share", "_milliseconds", "_batches", "_changed", "_shares", "_total")
    logged = ()
    neutral_at: ClassVar[Mapping[str, Any]] = {"prob": 0.0, "until": 0.0}

    def __init__(self, *, prob: float, until: float, keys: Sequence[str | int] | None) -> None:
        self.prob = prob
        self.until = until
        self.keys = keys

    def _reset(self) -> None:
        self._looked = False
        self._share: float = 0.0  # the fraction of the last micro-batch that was changed
        self._milliseconds = 0.0  # of the last micro-batch
        self._batches, self._changed = 0, 0
        self._shares, self._total = 0.0, 0.0  # sums over all micro-batches; the second in milliseconds
        self._figures: dict[str, float | Tensor] = dict.fromkeys(self.logged, 0.0)

    # -- for subclasses

    def look(self, step: Step, batch: Any) -> None:
        """Check the first batch on each rank, before any weight changes. An error on one rank is raised on all."""

    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        """Return the batch to train on and the fraction of it that is changed, or None to leave the batch unchanged."""
        raise NotImplementedError

    # -- the run

    @override
    def check(self, session: Session) -> None:
        check_until(session, who=type(self).__name__, until=self.until)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._look_once(lambda: self.look(step, batch))
        made = None
        if self._acts():
            with self._timed():
                made = self.change(step, batch, self.generator(step))
        output = proceed(batch if made is None else made[0])
        self._note(0.0 if made is None or output is None else made[1])
        return output

    def _look_once(self, look: Callable[[], None]) -> None:
        if not self._looked:
            on_all_ranks(self.session, look)
            self._looked = True

    def _acts(self) -> bool:
        """Return whether the run is still within ``until``."""
        return self.until == 1.0 or self.session.progress.u < self.until

    def generator(self, step: Step) -> Generator:
        """Return the CPU generator for all draws of this micro-batch."""
        return self.session.generator(type(self).__name__, step.global_step, step.batch_idx, self.session.rank)

    # -- what is logged and saved

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._milliseconds = 1000 * (time.perf_counter() - start)

    def _note(self, share: float) -> None:
        """Count a micro-batch, with the fraction ``share`` of it changed."""
        self._share = share
        self._batches += 1
        self._changed += share > 0
        self._shares += share
        self._total += self._milliseconds

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._milliseconds = 0.0
        self._figures = dict.fromkeys(self.logged, 0.0)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"share": self._share, "milliseconds": self._milliseconds, **self._figures}

    @override
    def summary(self) -> str:
        if not self._batches:
            return "took no step"
        return (
            f"changed {self._changed:,} of {self._batches:,} batches ({self._shares / self._batches:.1%} of their content) in"
            f" {self._total / self._batches:.2f} ms per batch"
        )


class ImageAugmentation(Augmentation):
    """Erases pixels of each image independently, with probability ``prob``. Labels are unchanged."""

    constraints = "needs automatic optimization and normalised floating-point images (B, C, H, W)"
    control = BASELINE

    @override
    def look(self, step: Step, batch: Any) -> None:
        self.fits(floating_images(batch, self.keys, who=type(self).__name__)[0])

    def fits(self, images: Tensor) -> None:
        """Raise ``ValueError`` if images of this shape, (B, C, H, W), cannot be changed."""

    def mask(self, images: Tensor, generator: Generator) -> Tensor:
        """Return which pixels of ``images`` to erase, (B, H, W), on their device."""
        raise NotImplementedError

    def fill(self, images: Tensor, generator: Generator) -> Tensor:
        """Return the values of erased pixels, in a shape that broadcasts to that of ``images``."""
        raise NotImplementedError

    @override
    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        found = floating_images(batch, self.keys, who=type(self).__name__)
        mask = self.mask(found[0], generator)
        if self.prob < 1.0:
            acts = torch.rand(len(mask), generator=generator, dtype=torch.float32) < self.prob
            mask = mask & acts.to(mask.device)[:, None, None]
        made = {id(t): torch.where(mask[:, None], self.fill(t, generator), t) for t in found}
        return replaced(batch, made), float(mask.float().mean())
