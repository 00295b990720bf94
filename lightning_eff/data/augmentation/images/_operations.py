"""Operations on images in [0, 1] that policies choose from, each image with its own strength; kornia does the work.

A strength of 0 leaves an image as it is, one of 1 or -1 is the end of the range in AutoAugment's table 6 (Cubuk et al. 2018).
Identity, auto-contrast, equalization and inversion have one strength alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lightning_eff.data.augmentation.images import _kornia

#: The longest way of a translation: 150 pixels of images of 331 (AutoAugment's table 6).
FARTHEST = 150 / 331
STEEPEST = 0.3
WIDEST = math.radians(30)


@dataclass(frozen=True)
class Operation:
    """What is done to images.

    Attributes:
        apply: of images (n, C, H, W) in [0, 1], their strengths (n,) on the CPU and the fill, the images that they become.
        signed: whether they lie in [-1, 1], as likely below 0 as above, instead of in [0, 1].
        moves: whether pixels come to lie elsewhere.
        coloured: whether it is for images of one or three channels alone.
    """

    apply: Callable[[Tensor, Tensor, float], Tensor]
    signed: bool = True
    moves: bool = False
    coloured: bool = False


def warped(x: Tensor, a: Tensor, fill: float) -> Tensor:
    """``y(p) = x(A (p, 1))`` for pixels ``p = (column, row)`` counted from the corner, bilinearly; ``fill`` beyond the border.

    Args:
        x: images, (n, C, H, W).
        a: ``A``, (n, 2, 3): where each pixel comes from.
        fill: the value outside of the image.
    """
    # centres of pixels lie half a pixel from the corner, and kornia takes the matrix from source to target
    linear = a[:, :, :2].inverse()
    half = a.new_full((2, 1), 0.5)
    forward = torch.cat([linear, linear @ (half - a[:, :, 2:]) - half], dim=2)
    size = (x.shape[2], x.shape[3])
    return _kornia.transform().warp_affine(x - fill, forward.to(x), size, padding_mode="zeros") + fill


def _affine(of: Callable[[Tensor, tuple[int, int]], Sequence[Sequence[Tensor | float]]]) -> Operation:
    """A geometric operation, by the rows of the matrix that :func:`warped` takes, for strengths (n,) and (H, W)."""

    def apply(x: Tensor, strength: Tensor, fill: float) -> Tensor:
        zero = torch.zeros_like(strength)
        rows = of(strength, (x.shape[2], x.shape[3]))
        a = torch.stack([torch.stack([zero + entry for entry in row], dim=1) for row in rows], dim=1)
        return warped(x, a, fill)

    return Operation(apply, moves=True)


def _rotation(strength: Tensor, side: tuple[int, int]) -> Sequence[Sequence[Tensor]]:
    """About the centre, anticlockwise where the strength is above 0."""
    angle, (y, x) = WIDEST * strength, (side[0] / 2, side[1] / 2)
    cos, sin = angle.cos(), angle.sin()
    return ((cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))


def _blended(name: str) -> Operation:
    """``(1 - f) d + f x`` with the factor ``f = 1 + 0.9 s`` and a degenerate ``d``: black, gray, the mean or blurred."""
    return Operation(
        lambda x, s, fill: getattr(_kornia.enhance(), name)(x, (1 + 0.9 * s).to(x)),
        coloured=name == "adjust_saturation_with_gray_subtraction",
    )


def levels(x: Tensor) -> Tensor:
    """The nearest of 256 levels, as images of bytes have them."""
    return (x * 255).round() / 255


def _auto_contrast(x: Tensor, strength: Tensor, fill: float) -> Tensor:
    """Each channel from 0 to 1; one of a single value stays."""
    flat = x.flatten(2)
    single = (flat.amax(-1) == flat.amin(-1))[:, :, None, None]
    return torch.where(single, x, _kornia.enhance().normalize_min_max(x, 0.0, 1.0, eps=1e-12))


def _posterize(x: Tensor, strength: Tensor, fill: float) -> Tensor:
    """The highest ``8 - round(4 s)`` bits."""
    return _kornia.enhance().posterize(levels(x), (8 - 4 * strength).round().long().to(x.device))


def _solarize(x: Tensor, strength: Tensor, fill: float) -> Tensor:
    """What is at ``1 - s`` or above is inverted: nothing at a strength of 0."""
    return _kornia.enhance().solarize(x, torch.where(strength == 0, 2.0, 1 - strength).to(x))


OPERATIONS: dict[str, Operation] = {
    "identity": Operation(lambda x, s, fill: x, signed=False),
    "auto_contrast": Operation(_auto_contrast, signed=False),
    "equalize": Operation(lambda x, s, fill: _kornia.enhance().equalize(levels(x)), signed=False),
    "rotate": _affine(_rotation),
    "solarize": Operation(_solarize, signed=False),
    "color": _blended("adjust_saturation_with_gray_subtraction"),
    "posterize": Operation(_posterize, signed=False),
    "contrast": _blended("adjust_contrast_with_mean_subtraction"),
    "brightness": _blended("adjust_brightness_accumulative"),
    "sharpness": _blended("sharpness"),
    "shear_x": _affine(lambda s, side: ((1.0, STEEPEST * s, 0.0), (0.0, 1.0, 0.0))),
    "shear_y": _affine(lambda s, side: ((1.0, 0.0, 0.0), (STEEPEST * s, 1.0, 0.0))),
    "translate_x": _affine(lambda s, side: ((1.0, 0.0, (FARTHEST * side[1] * s).round()), (0.0, 1.0, 0.0))),
    "translate_y": _affine(lambda s, side: ((1.0, 0.0, 0.0), (0.0, 1.0, (FARTHEST * side[0] * s).round()))),
    "invert": Operation(lambda x, s, fill: _kornia.enhance().invert(x), signed=False),
}


def check_names(operations: Sequence[str], *, who: str, name: str) -> None:
    """Raise ``ValueError`` unless they are names of operations, at least one."""
    if isinstance(operations, str) or not isinstance(operations, Sequence) or not operations:
        raise ValueError(f"{who}({name}={operations!r}): expected a list of operations: {', '.join(OPERATIONS)}.")
    unknown = [one for one in operations if one not in OPERATIONS]
    if unknown:
        raise ValueError(
            f"{who}({name}={list(operations)}): there is no operation {unknown[0]!r}; expected {', '.join(OPERATIONS)}."
        )


def signed(names: Sequence[str], which: Tensor, strength: Tensor, generator: Generator) -> Tensor:
    """The strengths with a random sign where their operation has one, each as likely.

    Args:
        names: of operations.
        which: for each image the place of its operation among ``names``.
        strength: in [0, 1], of the shape of ``which``.
        generator: on the CPU.
    """
    down = torch.rand(which.shape, generator=generator, dtype=torch.float32) < 0.5
    either = torch.tensor([OPERATIONS[name].signed for name in names])[which]
    return torch.where(either & down, -strength, strength)


def operated(x: Tensor, names: Sequence[str], which: Tensor, strength: Tensor, fill: float) -> Tensor:
    """Each image with its own operation done to it, those of one operation together.

    Args:
        x: images (B, C, H, W) of floating point in [0, 1].
        names: of operations.
        which: for each image the place of its operation among ``names``, (B,), on the CPU; -1 leaves it as it is.
        strength: of each, (B,), on the CPU, with its sign.
        fill: the value of pixels that come from outside of the image.
    """
    made = x.clone()
    for place, name in enumerate(names):
        rows = (which == place).nonzero()[:, 0]
        if name == "identity" or not len(rows):
            continue
        there = rows.to(x.device)
        made[there] = OPERATIONS[name].apply(x[there], strength[rows].double(), fill).clamp(0, 1)
    return made
