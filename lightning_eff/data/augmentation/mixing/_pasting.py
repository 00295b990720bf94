"""Images with a box pasted from another image: the boxes for given shares, and the resulting shares."""

import torch
from torch import Generator, Tensor

from lightning_eff.data.augmentation._boxes import inside, numbers
from lightning_eff.data.augmentation._mixing import draw_shares


def sides(share: Tensor, side: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return ``H sqrt(1 - lambda)`` and ``W sqrt(1 - lambda)`` in whole pixels, each in the shape of ``share``."""
    height, width = ((size * (1 - share).sqrt()).long() for size in side)
    return height, width


def boxes(share: Tensor, side: tuple[int, int], generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw boxes of height ``H sqrt(1 - lambda)`` and width ``W sqrt(1 - lambda)``, with centres anywhere in the image.

    Args:
        share: ``lambda``, (n,), in [0, 1].
        side: H and W, in pixels.
        generator: draws the centres.

    Returns:
        The first row, the first column, the number of rows and the number of columns of each box: (n,) integers, not clipped to
        the image.
    """
    height, width = sides(share, side)
    centres = [torch.randint(0, size, share.shape, generator=generator) for size in side]
    return centres[0] - height // 2, centres[1] - width // 2, height, width


def pasted(x: Tensor, partner: Tensor, own: Tensor) -> Tensor:
    """Return ``M * x_i + (1 - M) * x_j`` with ``j = partner[i]``, where ``M`` is a binary mask.

    Args:
        x: images, (B, C, H, W).
        partner: ``j``, (B,), integers.
        own: ``M``, (B, H, W) or (1, H, W), bool, on the images' device.
    """
    return torch.where(own[:, None], x, x.index_select(0, partner.to(x.device)))


def pasted_box(x: Tensor, partner: Tensor, box: tuple[slice, slice], *, inner: bool) -> Tensor:
    """Return what :func:`pasted` does for one box in all images, of which only the box is copied twice.

    Args:
        x: images, (B, C, H, W), not changed.
        partner: ``j``, (B,), integers.
        box: its rows and columns.
        inner: whether the box stays each image's own, and the rest is pasted.
    """
    partner = partner.to(x.device)
    if inner:
        mixture = x.index_select(0, partner)
        mixture[..., *box] = x[..., *box]
    else:
        mixture = x.clone()
        mixture[..., *box] = x[..., *box].index_select(0, partner)
    return mixture


def own_share(own: Tensor) -> Tensor:
    """Return ``lambda' = 1 - area / (H W)`` for the pasted area after clipping: (n,), float64."""
    return own.double().mean(dim=(1, 2))


def cut_mix(alpha: float, count: int, side: tuple[int, int], generator: Generator) -> Tensor:
    """Draw CutMix masks: which pixels of ``count`` images stay their own, (count, H, W), bool, on the CPU.

    If the box is larger than half of the image, box and rest change roles, so that each image keeps at least half of its
    pixels.

    Args:
        alpha: the parameter of ``lambda ~ Beta(alpha, alpha)``.
        count: the number of images.
        side: H and W.
        generator: draws the shares and centres.
    """
    share = draw_shares(alpha, count, numbers(generator))
    own = ~inside(*boxes(share, side, generator), side, torch.device("cpu"))
    return own ^ (own_share(own) < 0.5)[:, None, None]


def cut_mix_box(alpha: float, side: tuple[int, int], generator: Generator) -> tuple[tuple[slice, slice], bool, float]:
    """Draw the box that :func:`cut_mix` draws for a single mask.

    Returns:
        The rows and columns of the box, whether it stays each image's own and the rest is pasted, and ``lambda'``.
    """
    share = draw_shares(alpha, 1, numbers(generator))
    top, left, height, width = (int(t) for t in boxes(share, side, generator))
    rows, columns = (
        (max(0, first), max(0, min(first + size, whole)))
        for first, size, whole in ((top, height, side[0]), (left, width, side[1]))
    )
    pixels, area = side[0] * side[1], (rows[1] - rows[0]) * (columns[1] - columns[0])
    inner = (pixels - area) / pixels < 0.5
    return (slice(*rows), slice(*columns)), inner, (area if inner else pixels - area) / pixels
