"""Boxes of pixels in images, which may leave them at the border."""

import numpy as np
import torch
from torch import Tensor


def numbers(generator: torch.Generator) -> np.random.Generator:
    """Numbers of other distributions than torch draws from a generator, that follow from its seed."""
    return np.random.default_rng(generator.initial_seed())


def inside(
    top: Tensor, left: Tensor, height: Tensor, width: Tensor, side: tuple[int, int], device: torch.device
) -> Tensor:
    """Which pixels of images of ``side`` (H, W) lie in each of n boxes: (n, H, W), of bool, on ``device``.

    Args:
        top: the first row of each box, (n,), of integers, below 0 where it begins above the image.
        left: the first column.
        height: rows of each box, whether or not they lie in the image.
        width: columns.
        side: H and W.
        device: of the mask.
    """
    top, left, height, width = (t.to(device, torch.long)[:, None] for t in (top, left, height, width))
    rows, columns = (torch.arange(size, device=device)[None] for size in side)
    in_rows = (rows >= top) & (rows < top + height)
    in_columns = (columns >= left) & (columns < left + width)
    return in_rows[:, :, None] & in_columns[:, None, :]
