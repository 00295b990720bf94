"""Boxes of pixels in images. A box may extend beyond the border."""

import numpy as np
import torch
from torch import Tensor


def numbers(generator: torch.Generator) -> np.random.Generator:
    """Return a NumPy generator with the same seed, for distributions that torch cannot draw from a generator."""
    return np.random.default_rng(generator.initial_seed())


def inside(
    top: Tensor, left: Tensor, height: Tensor, width: Tensor, side: tuple[int, int], device: torch.device
) -> Tensor:
    """Return which pixels of an image lie in each of n boxes: a bool mask (n, H, W) on ``device``.

    Args:
        top: the first row of each box, (n,) integers. Negative where a box begins above the image.
        left: the first column of each box.
        height: the number of rows of each box, including those outside the image.
        width: the number of columns of each box.
        side: H and W.
        device: the device of the mask.
    """
    top, left, height, width = (t.to(device, torch.long)[:, None] for t in (top, left, height, width))
    rows, columns = (torch.arange(size, device=device)[None] for size in side)
    in_rows = (rows >= top) & (rows < top + height)
    in_columns = (columns >= left) & (columns < left + width)
    return in_rows[:, :, None] & in_columns[:, None, :]
