"""What augmentations share: in which steps they act, what they draw from, and what they cost."""

import time
from collections.abc import Callable, Iterator, Sequence
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
from lightning_eff._core.technique import Technique
from lightning_eff.data.augmentation._arguments import check_names, check_number


def replaced(batch: Any, by: dict[int, Tensor]) -> Any:
    """The batch, of the same make, with other tensors in the place of those with these ids."""
    return map_tensors(batch, lambda t: by.get(id(t), t))


def floating_images(
    batch: Any, keys: Sequence[str | int] | None, *, who: str, beside: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The images (B, C, H, W) of a batch of any make, of one number and size.

    Args:
        batch: tensors in a dict, tuple, list or dataclass.
        keys: names or positions of the images; None takes all 4-D tensors of floating point.
        who: the technique's name, for messages.
        beside: tensors that are none, such as labels.

    Raises:
        ValueError: if there are none, or they are not of floating point; with what was found.
    """
    found = find_images(batch, keys, who=who, beside=[id(t) for t in beside])
    named = [(path, t) for path, t in tensors(batch) if id(t) in found.images]
    whole = [path or "the batch" for path, t in named if not t.is_floating_point()]
    if whole:
        raise ValueError(
            f"{who}: the images {', '.join(whole)} are of uint8; expected floating point, normalised, because what is made of"
            " them is rounded otherwise. Convert and normalise them in the data set or its collate_fn."
        )
    return list({id(t): t for _, t in named}.values())


class Augmentation(Technique):
    """Changes training batches on their device, by draws that follow from the seed, the step, the micro-batch and the rank.

    So a resumed run draws what the undisturbed one did, and ranks draw apart. Validation, test and prediction, and passes
    that look at a batch, never come by it.

    Class attributes, beside those of :class:`Technique`:
        stage: of its link.
        order: where it stands among the augmentations of its stage, whatever the order of the callbacks.

    Attributes:
        prob: the chance of a micro-batch to be changed, in [0, 1].
        until: the share of the budget from which on batches are left alone.
        keys: names or positions of the tensors that are changed; None looks for them.
    """

    stage: ClassVar[Stage] = Stage.AUGMENT
    needs: ClassVar[Need] = Need.BATCH
    order: ClassVar[int] = 0

    def __init__(self, *, prob: float, until: float, keys: Sequence[str | int] | None) -> None:
        who = type(self).__name__
        check_number(prob, who=who, name="prob", low=0, high=1, what="the chance to be changed; 0 is plain training")
        check_number(until, who=who, name="until", low=0, high=1, what="the share of the budget from which on it rests")
        check_names(keys, who=who, name="keys")
        self.prob = prob
        self.until = until
        self.keys = None if keys is None else list(keys)
        self._reset()

    def _reset(self) -> None:
        self._looked = False
        self._share: float = 0.0  # of what the last micro-batch held
        self._milliseconds = 0.0  # of the last micro-batch
        self._batches, self._changed = 0, 0
        self._shares, self._total = 0.0, 0.0  # over all of them; milliseconds

    # -- what subclasses say

    def look(self, step: Step, batch: Any) -> None:
        """Look at the first batch, on every rank; what is raised on one is raised on all, before any weight has changed."""

    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        """The batch that is trained on instead, and the share of it that is changed; None where it is as it was."""
        raise NotImplementedError

    # -- the run

    @property
    @override
    def neutral(self) -> bool:
        return self.prob == 0.0 or self.until == 0.0

    @override
    def check(self, session: Session) -> None:
        if self.until < 1.0 and not session.progress.limits():
            raise ValueError(
                f"{type(self).__name__}(until={self.until}): the Trainer has no end (max_steps=-1, max_epochs=-1,"
                " max_time=None) that it could be a fraction of. Set one of them, or until=1.0."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(self.stage, self._link, self.order)

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
        """Whether the budget is such that batches are changed."""
        return self.until == 1.0 or self.session.progress.u < self.until

    def generator(self, step: Step) -> Generator:
        """What is drawn for this micro-batch comes of it; on the CPU."""
        return self.session.generator(type(self).__name__, step.global_step, step.batch_idx, self.session.rank)

    # -- what it tells and keeps

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._milliseconds = 1000 * (time.perf_counter() - start)

    def _note(self, share: float) -> None:
        """A micro-batch went by, of which ``share`` was changed."""
        self._share = share
        self._batches += 1
        self._changed += share > 0
        self._shares += share
        self._total += self._milliseconds

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._milliseconds = 0.0

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"share": self._share, "milliseconds": self._milliseconds}

    @override
    def summary(self) -> str:
        if not self._batches:
            return "no step taken"
        return (
            f"changed {self._changed:,} of {self._batches:,} batches, {self._shares / self._batches:.1%} of what they held, in"
            f" {self._total / self._batches:.2f} ms a batch"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "share": self._share,
            "milliseconds": self._milliseconds,
            "batches": self._batches,
            "changed": self._changed,
            "shares": self._shares,
            "total": self._total,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share, self._milliseconds = state_dict["share"], state_dict["milliseconds"]
        self._batches, self._changed = state_dict["batches"], state_dict["changed"]
        self._shares, self._total = state_dict["shares"], state_dict["total"]


class ImageAugmentation(Augmentation):
    """Changes images one by one, each by itself, with the chance ``prob``; labels stay."""

    @override
    def look(self, step: Step, batch: Any) -> None:
        self.fits(floating_images(batch, self.keys, who=type(self).__name__)[0])

    def fits(self, images: Tensor) -> None:
        """Raise ``ValueError`` if images as these, (B, C, H, W), cannot be changed."""

    def mask(self, images: Tensor, generator: Generator) -> Tensor:
        """Which pixels of ``images`` are erased, (B, H, W), on their device."""
        raise NotImplementedError

    def fill(self, images: Tensor, generator: Generator) -> Tensor:
        """What erased pixels become: of a shape that broadcasts to that of ``images``."""
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
