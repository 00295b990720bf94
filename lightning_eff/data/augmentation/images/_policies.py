"""The engine of policies: random operations on each image, in the range of values for which they are defined."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._engine import (
    BASELINE,
    Augmentation,
    check_nothing_on_pixels,
    replaced,
    whole_images,
)
from lightning_eff.data.augmentation.images import _kornia
from lightning_eff.data.augmentation.images._operations import OPERATIONS, operated
from lightning_eff.data.augmentation.images._pixels import Pixels, beyond


class Policy(Augmentation):
    """Applies random operations to each training image independently, with probability ``prob``. Labels are unchanged.

    Attributes:
        pixels: the range of the images' values.
        fill: the value of pixels from outside of the image, from 0 (black) to 1 (white).
        independent: whether each image tensor of a batch has draws of its own.
    """

    independent = False
    constraints = (
        "needs kornia (the extra `augmentation`), automatic optimization, images (B, C, H, W) with a known range of values,"
        " and one label per image"
    )
    order = -1  # before boxes are erased
    checkpointed = ("_clipped",)
    control = BASELINE

    def __init__(
        self,
        *,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        scale: float,
        fill: float,
        prob: float,
        until: float,
        keys: Sequence[str | int] | None,
    ) -> None:
        self.pixels = Pixels(mean, std, scale, who=type(self).__name__)
        self.fill = fill
        super().__init__(prob=prob, until=until, keys=keys)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._clipped: float | Tensor = 0.0

    # -- for subclasses

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of the operations."""

    @abstractmethod
    def draw(self, count: int, generator: Generator) -> Any:
        """Draw what to do to ``count`` images, on the CPU.

        With the default :meth:`done`, return the indices of operations in :attr:`names` (-1 for none) and their strengths, each
        (count, N), in the order in which they are applied.
        """

    def done(self, p: Tensor, drawn: Any) -> Tensor:
        """Return the changed images (B, C, H, W) in [0, 1], without changing ``p`` in place."""
        for which, strength in zip(drawn[0].T, drawn[1].T, strict=True):
            p = operated(p, self.names, which, strength, self.fill)
        return p

    @abstractmethod
    def touched(self, drawn: Any) -> Tensor:
        """Return which images are changed, (B,), bool, on the CPU."""

    # -- the run

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        _kornia.needed(type(self).__name__)

    def images(self, batch: Any) -> list[Tensor]:
        """Return the images of a batch, (B, C, H, W), floating point or uint8, all with the same B, H and W."""
        return whole_images(batch, self.keys, who=type(self).__name__)

    @override
    def look(self, step: Step, batch: Any) -> None:
        self.fits(batch)

    def fits(self, batch: Any) -> None:
        """Raise ``ValueError`` if the images of the batch cannot be changed."""
        who = type(self).__name__
        moving = [name for name in self.names if OPERATIONS[name].moves]
        if moving:
            check_nothing_on_pixels(batch, self.keys, who=who, after=", ".join(moving), mend=self._without(moving))
        for images in self.images(batch):
            channels, *side = images.shape[1:]
            coloured = [name for name in self.names if OPERATIONS[name].coloured]
            if channels not in (1, 3) and coloured:
                raise ValueError(
                    f"{who}: the images {tuple(images.shape)} have {channels} channels, for which {', '.join(coloured)} is not"
                    f" defined. {self._without(coloured)}"
                )
            if min(side) < 3:
                raise ValueError(
                    f"{who}: the images {tuple(images.shape)} have {side[0]} x {side[1]} pixels, fewer than 3 x 3."
                    f" Remove {who}."
                )
            self.pixels.fits(images)

    def _without(self, names: Sequence[str]) -> str:
        """Return how to leave out the operations with these names."""
        return f"Remove {type(self).__name__}."

    @override
    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        return self.changed(batch, generator)

    def changed(self, batch: Any, generator: Generator) -> tuple[Any, float]:
        """Return the batch with changed images, and the fraction of them that is changed."""
        found = self.images(batch)
        draws = [self._drawn(len(found[0]), generator) for _ in (found if self.independent else found[:1])]
        with torch.no_grad():
            whole = [self.pixels.whole(t) for t in found]
            self._clipped = torch.stack([beyond(p) for p in whole]).amax()
            made: dict[int, Tensor] = {}
            for i, (t, p) in enumerate(zip(found, whole, strict=True)):
                made[id(t)] = self._replaced(t, p.clamp(0, 1), *draws[i if self.independent else 0])
        return replaced(batch, made), float(torch.cat([acts for acts, _ in draws]).float().mean())

    def _drawn(self, count: int, generator: Generator) -> tuple[Tensor, Any]:
        """Return which of ``count`` images are changed, and what is drawn for them."""
        acts = torch.rand(count, generator=generator, dtype=torch.float32) < self.prob
        drawn = self.draw(count, generator)
        return acts & self.touched(drawn), drawn

    def _replaced(self, images: Tensor, p: Tensor, acts: Tensor, drawn: Any) -> Tensor:
        """Return the images, bit for bit unchanged where ``acts`` is false."""
        made = self.pixels.back(self.done(p, drawn), images)
        return torch.where(acts.to(images.device)[:, None, None, None], made, images)

    # -- what is logged and saved

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "clipped": self._clipped}
