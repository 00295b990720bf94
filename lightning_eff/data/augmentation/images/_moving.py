"""The engine of flips and crops: each pixel of an image takes the value of another pixel, or of none."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._engine import (
    BASELINE,
    Augmentation,
    check_nothing_on_pixels,
    replaced,
    whole_images,
)


def moved(x: Tensor, rows: Tensor, columns: Tensor, fill: float | Sequence[float] = 0.0) -> Tensor:
    """Return ``y[b, :, i, j] = x[b, :, rows[b, i], columns[b, j]]``, in the dtype and memory format of ``x``.

    Args:
        x: images, (B, C, H, W).
        rows: the row from which each row is taken, (B, H), on the CPU. -1 for none.
        columns: the column from which each column is taken, (B, W), on the CPU. -1 for none.
        fill: the value of pixels whose row or column is -1, one number or one per channel.
    """
    outside = bool((rows < 0).any() or (columns < 0).any())  # read on the CPU, so no device has to be waited for
    rows, columns = (t.to(x.device, non_blocking=True) for t in (rows, columns))
    each = torch.arange(len(x), device=x.device)[:, None, None]
    y = x.permute(0, 2, 3, 1)[each, rows.clamp(min=0)[:, :, None], columns.clamp(min=0)[:, None, :]]
    if outside:
        empty = (rows < 0)[:, :, None] | (columns < 0)[:, None, :]
        y = torch.where(empty[..., None], torch.tensor(fill, dtype=x.dtype, device=x.device), y)
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    form = torch.channels_last if last else torch.contiguous_format
    return y.permute(0, 3, 1, 2).contiguous(memory_format=form)


class Moving(Augmentation):
    """Moves the pixels of each image along its rows and columns. Labels are unchanged.

    Attributes:
        fill: the value of pixels that take no other pixel's value, one number or one per channel.
        independent: whether each image tensor of a batch has draws of its own.
    """

    constraints = "needs automatic optimization, images (B, C, H, W), and labels that stay right when pixels move"
    control = BASELINE
    fill: float | Sequence[float] = 0.0
    independent = False

    @abstractmethod
    def places(self, count: int, side: tuple[int, int], generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw the rows (B, H) and the columns (B, W) of :func:`moved` for ``count`` images of ``side`` (H, W)."""

    @override
    def look(self, step: Step, batch: Any) -> None:
        who = type(self).__name__
        mend = f"Move them with the images in the data set, or remove {who}."
        check_nothing_on_pixels(batch, self.keys, who=who, after="their pixels move", mend=mend)

    @override
    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        found = whole_images(batch, self.keys, who=type(self).__name__)
        count, _, height, width = found[0].shape
        each = found if self.independent else found[:1]
        draws = [self.places(count, (height, width), generator) for _ in each]
        still = torch.arange(height), torch.arange(width)
        touched = torch.cat([((rows != still[0]).any(1) | (columns != still[1]).any(1)) for rows, columns in draws])
        if not bool(touched.any()):
            return None
        made = {id(t): moved(t, *draws[i if self.independent else 0], self.fill) for i, t in enumerate(found)}
        return replaced(batch, made), float(touched.float().mean())
