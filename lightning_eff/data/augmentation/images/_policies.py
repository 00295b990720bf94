"""The engine of policies: operations done to each image by itself, in the values that operations are defined on."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._images.images import find_images
from lightning_eff._core.batches import tensors
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._arguments import check_number
from lightning_eff.data.augmentation._engine import Augmentation, replaced
from lightning_eff.data.augmentation.images import _kornia
from lightning_eff.data.augmentation.images._operations import OPERATIONS
from lightning_eff.data.augmentation.images._pixels import Pixels, beyond

_ON_PIXELS = re.compile(r"box|keypoint|landmark", re.IGNORECASE)


class Policy(Augmentation):
    """Does operations to the images of training batches, each image with its own, with the chance ``prob``; labels stay.

    Attributes:
        pixels: what values mean.
        fill: of pixels that come from outside of the image, from 0 for black to 1 for white.
    """

    order: ClassVar[int] = -1  # before boxes are erased

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
        who = type(self).__name__
        self.pixels = Pixels(mean, std, scale, who=who)
        check_number(fill, who=who, name="fill", low=0, high=1, what="from black to white, of what lies outside")
        self.fill = fill
        super().__init__(prob=prob, until=until, keys=keys)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._beyond: float | Tensor = 0.0

    # -- what subclasses say

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The operations that may be done."""

    @abstractmethod
    def draw(self, count: int, generator: Generator) -> Any:
        """What is to be done to ``count`` images, on the CPU."""

    @abstractmethod
    def done(self, p: Tensor, drawn: Any) -> Tensor:
        """What becomes of images (B, C, H, W) in [0, 1], by what was drawn for them; ``p`` itself is left as it is."""

    @abstractmethod
    def touched(self, drawn: Any) -> Tensor:
        """To which images anything is done, (B,) of bool, on the CPU."""

    # -- the run

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        _kornia.needed(type(self).__name__)

    def images(self, batch: Any) -> list[Tensor]:
        """The images of a batch, (B, C, H, W) of floating point or uint8, of one number and size."""
        found = find_images(batch, self.keys, who=type(self).__name__)
        return list({id(t): t for _, t in tensors(batch) if id(t) in found.images}.values())

    @override
    def look(self, step: Step, batch: Any) -> None:
        who, named = type(self).__name__, tensors(batch)
        found = find_images(batch, self.keys, who=who)
        moving = [name for name in self.names if OPERATIONS[name].moves]
        on_pixels = [p or "the batch" for p, t in named if id(t) in found.targets or _ON_PIXELS.search(p)]
        if moving and on_pixels:
            raise ValueError(
                f"{who}: the batch holds {', '.join(on_pixels)}, which would no longer lie on the images that"
                f" {', '.join(moving)} move; expected labels of whole images. {self._without(moving)}"
            )
        for images in self.images(batch):
            channels, *side = images.shape[1:]
            coloured = [name for name in self.names if OPERATIONS[name].coloured]
            if channels not in (1, 3) and coloured:
                raise ValueError(
                    f"{who}: the images {tuple(images.shape)} have {channels} channels, in which {', '.join(coloured)} has no"
                    f" meaning; expected 1 or 3. {self._without(coloured)}"
                )
            if min(side) < 3:
                raise ValueError(
                    f"{who}: the images {tuple(images.shape)} are of {side[0]} x {side[1]} pixels; expected at least 3 x 3."
                    " Take the technique out."
                )
            self.pixels.fits(images)

    def _without(self, names: Sequence[str]) -> str:
        """How the operations with these names are left out."""
        return "Take the technique out."

    @override
    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        found = self.images(batch)
        acts = torch.rand(len(found[0]), generator=generator, dtype=torch.float32) < self.prob
        drawn = self.draw(len(acts), generator)
        acts &= self.touched(drawn)
        with torch.no_grad():
            whole = [self.pixels.whole(t) for t in found]
            self._beyond = torch.stack([beyond(p) for p in whole]).amax()
            made = {id(t): self._replaced(t, p.clamp(0, 1), acts, drawn) for t, p in zip(found, whole, strict=True)}
        return replaced(batch, made), float(acts.float().mean())

    def _replaced(self, images: Tensor, p: Tensor, acts: Tensor, drawn: Any) -> Tensor:
        """The images, those that ``acts`` leaves out bit for bit what they were."""
        made = self.pixels.back(self.done(p, drawn), images)
        return torch.where(acts.to(images.device)[:, None, None, None], made, images)

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "clipped": self._beyond}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clipped": float(self._beyond)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._beyond = state_dict["clipped"]
