"""Operations on images in [0, 1] for policies, computed by kornia, with a strength for each image.

A strength of 0 leaves an image unchanged. 1 or -1 is the end of the range in table 6 of AutoAugment (Cubuk et al. 2018).
Identity, auto-contrast, equalization and inversion have no strength.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lightning_eff._core._arguments.kinds import SomeOf
from lightning_eff.data.augmentation.images import _kornia

#: The largest translation: 150 of 331 pixels (AutoAugment, table 6).
FARTHEST = 150 / 331
STEEPEST = 0.3
WIDEST = math.radians(30)


@dataclass(frozen=True)
class Operation:
    """An operation on images.

    Attributes:
        apply: a function of images (n, C, H, W) in [0, 1], strengths (n,) on the CPU and the fill that returns the new images.
        signed: whether strengths have a random sign.
        coloured: whether it needs images of one or three channels.
        matrix: for an operation that moves pixels, a function of strengths (n,) and (H, W) that returns the matrices of
            :func:`warped`. Images with different matrices are then warped together.
    """

    apply: Callable[[Tensor, Tensor, float], Tensor]
    signed: bool = True
    coloured: bool = False
    matrix: Callable[[Tensor, tuple[int, int]], Tensor] | None = None

    @property
    def moves(self) -> bool:
        """Whether pixels change their positions."""
        return self.matrix is not None


def warped(x: Tensor, a: Tensor, fill: float) -> Tensor:
    """Return ``y(p) = x(A (p, 1))`` with bilinear interpolation, for pixels ``p = (column, row)`` counted from the corner.

    Args:
        x: images, (n, C, H, W).
        a: ``A``, (n, 2, 3), which gives the source of each pixel.
        fill: the value outside of the image.
    """
    height, width = x.shape[2:]
    # the same map between coordinates from -1 to 1, in which p = (p' + 1) (W, H) / 2
    ratio = a.new_tensor([[1.0, height / width], [width / height, 1.0]])
    linear = a[:, :, :2] * ratio
    shift = linear.sum(dim=2) + 2 * a[:, :, 2] / a.new_tensor([width, height]) - 1
    theta = torch.cat([linear, shift[:, :, None]], dim=2).to(x)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x - fill, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + fill


def _affine(of: Callable[[Tensor, tuple[int, int]], Sequence[Sequence[Tensor | float]]]) -> Operation:
    """Return a geometric operation, given the rows of the matrix of :func:`warped` for strengths (n,) and (H, W)."""

    def matrix(strength: Tensor, side: tuple[int, int]) -> Tensor:
        zero = torch.zeros_like(strength)
        return torch.stack([torch.stack([zero + entry for entry in row], dim=1) for row in of(strength, side)], dim=1)

    def apply(x: Tensor, strength: Tensor, fill: float) -> Tensor:
        return warped(x, matrix(strength, (x.shape[2], x.shape[3])), fill)

    return Operation(apply, matrix=matrix)


def _rotation(strength: Tensor, side: tuple[int, int]) -> Sequence[Sequence[Tensor]]:
    """Return the matrix of a rotation about the centre, anticlockwise for positive strengths."""
    angle, (y, x) = WIDEST * strength, (side[0] / 2, side[1] / 2)
    cos, sin = angle.cos(), angle.sin()
    return ((cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))


def _blended(name: str) -> Operation:
    """Return ``(1 - f) d + f x`` with ``f = 1 + 0.9 s`` and a degenerate image ``d``: black, gray, the mean or blurred."""
    return Operation(
        lambda x, s, fill: getattr(_kornia.enhance(), name)(x, (1 + 0.9 * s).to(x)),
        coloured=name == "adjust_saturation_with_gray_subtraction",
    )


def levels(x: Tensor) -> Tensor:
    """Round to the 256 levels of uint8 images."""
    return (x * 255).round() / 255


def _auto_contrast(x: Tensor, strength: Tensor, fill: float) -> Tensor:
    """Stretch each channel to [0, 1]. A constant channel is unchanged."""
    flat = x.flatten(2)
    single = (flat.amax(-1) == flat.amin(-1))[:, :, None, None]
    return torch.where(single, x, _kornia.enhance().normalize_min_max(x, 0.0, 1.0, eps=1e-12))


def _posterize(x: Tensor, strength: Tensor, fill: float) -> Tensor:
    """Keep the highest ``8 - round(4 s)`` bits."""
    return _kornia.enhance().posterize(levels(x), (8 - 4 * strength).round().long().to(x.device))


def _solarize(x: Tensor, strength: Tensor, fill: float) -> Tensor:
    """Invert values from ``1 - s`` on. A strength of 0 inverts nothing."""
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


#: A list of some of the operations.
SOME = SomeOf(tuple(OPERATIONS))


def signed(names: Sequence[str], which: Tensor, strength: Tensor, generator: Generator) -> Tensor:
    """Give strengths a random sign if their operation has one.

    Args:
        names: the names of operations.
        which: the index of each image's operation in ``names``.
        strength: in [0, 1], in the shape of ``which``.
        generator: on the CPU.
    """
    down = torch.rand(which.shape, generator=generator, dtype=torch.float32) < 0.5
    either = torch.tensor([OPERATIONS[name].signed for name in names])[which]
    return torch.where(either & down, -strength, strength)


def operated(x: Tensor, names: Sequence[str], which: Tensor, strength: Tensor, fill: float) -> Tensor:
    """Apply its own operation to each image. All images whose pixels move are warped together, each by its own matrix.

    Args:
        x: floating-point images (B, C, H, W) in [0, 1].
        names: the names of operations.
        which: the index of each image's operation in ``names``, (B,), on the CPU. -1 leaves the image unchanged.
        strength: the signed strength for each image, (B,), on the CPU.
        fill: the value of pixels from outside of the image.
    """
    made = x.clone()
    moved: list[tuple[Tensor, Tensor]] = []  # images, and their matrices

    def put(rows: Tensor, apply: Callable[[Tensor], Tensor]) -> None:
        there = rows.to(x.device)
        made[there] = apply(x[there]).clamp(0, 1)

    for place, name in enumerate(names):
        rows = (which == place).nonzero()[:, 0]
        if name == "identity" or not len(rows):
            continue
        operation, own = OPERATIONS[name], strength[rows].double()
        if operation.matrix is not None:
            moved.append((rows, operation.matrix(own, (x.shape[2], x.shape[3]))))
        else:
            put(rows, lambda some, operation=operation, own=own: operation.apply(some, own, fill))
    if moved:
        rows, matrices = (torch.cat(parts) for parts in zip(*moved, strict=True))
        put(rows, lambda some: warped(some, matrices, fill))
    return made
