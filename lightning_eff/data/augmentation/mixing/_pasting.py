"""Images made of two by pasting: boxes of the size that a share asks for, and the shares that they end with."""

import torch
from torch import Generator, Tensor

from lightning_eff.data.augmentation._boxes import inside, numbers
from lightning_eff.data.augmentation._mixing import draw_shares


def sides(share: Tensor, side: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """``H sqrt(1 - lambda)`` and ``W sqrt(1 - lambda)``, in whole pixels: each of the shape of ``share``."""
    height, width = ((size * (1 - share).sqrt()).long() for size in side)
    return height, width


def boxes(share: Tensor, side: tuple[int, int], generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Boxes of height ``H sqrt(1 - lambda)`` and width ``W sqrt(1 - lambda)`` whose centres lie anywhere in the image.

    Args:
        share: ``lambda``, (n,), in [0, 1].
        side: H and W, in pixels.
        generator: of the centres.

    Returns:
        The first row, the first column, rows and columns of each, (n,) of integers; not clipped to the image.
    """
    height, width = sides(share, side)
    centres = [torch.randint(0, size, share.shape, generator=generator) for size in side]
    return centres[0] - height // 2, centres[1] - width // 2, height, width


def pasted(x: Tensor, partner: Tensor, own: Tensor) -> Tensor:
    """``M * x_i + (1 - M) * x_j`` with ``j = partner[i]``: each pixel comes wholly of one of the two.

    Args:
        x: images, (B, C, H, W).
        partner: ``j``, (B,), of integers.
        own: ``M``, (B, H, W) or (1, H, W), of bool, on the images' device.
    """
    return torch.where(own[:, None], x, x.index_select(0, partner.to(x.device)))


def own_share(own: Tensor) -> Tensor:
    """``lambda' = 1 - area / (H W)``, of what is pasted as it ended at the border: (n,), float64."""
    return own.double().mean(dim=(1, 2))


def cut_mix(alpha: float, count: int, side: tuple[int, int], generator: Generator) -> Tensor:
    """Which pixels of ``count`` images are their own in CutMix: (count, H, W), of bool, on the CPU.

    Where the box is the larger part, the box is what is their own: each keeps at least half of its pixels.

    Args:
        alpha: of ``lambda ~ Beta(alpha, alpha)``.
        count: of images.
        side: H and W.
        generator: of the shares and centres.
    """
    share = draw_shares(alpha, count, numbers(generator))
    own = ~inside(*boxes(share, side, generator), side, torch.device("cpu"))
    return own ^ (own_share(own) < 0.5)[:, None, None]
