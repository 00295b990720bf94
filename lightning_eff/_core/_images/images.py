"""The images in batches of any make: finding them by shape, and making them smaller, with what lies on their pixels."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_eff._core.batches import lies_at, map_tensors, tensors

Side = tuple[int, int]
Filter = Callable[[Tensor, Side], Tensor]

_PIXELS = re.compile(r"box|keypoint|landmark", re.IGNORECASE)


def resize(images: Tensor, side: Side) -> Tensor:
    """Images (N, C, H, W) of floating point at ``side``, bilinearly and without aliasing, as image libraries shrink."""
    return F.interpolate(images, size=side, mode="bilinear", align_corners=False, antialias=True)


def nearest(t: Tensor, side: Side) -> Tensor:
    """``t`` (..., H, W) of any dtype at ``side``: each pixel is the one that its centre lies in."""
    for dim, size in zip((-2, -1), side, strict=True):
        full = t.shape[dim]
        centres = (torch.arange(size, dtype=torch.float64) + 0.5) * (full / size)
        t = t.index_select(dim, centres.long().clamp(max=full - 1).to(t.device))
    return t


def filtered(images: Tensor, side: Side, fn: Filter) -> Tensor:
    """What ``fn`` makes of images, computed in float32 or above, in their own dtype and memory format.

    Pixels of uint8 are rounded, and end at 0 and 255.
    """
    exact = images if images.dtype in (torch.float32, torch.float64) else images.float()
    out = fn(exact, side)
    if images.dtype == torch.uint8:
        out = out.round().clamp(0, 255)
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return out.to(images.dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@dataclass(frozen=True)
class Images:
    """Where a batch holds its images.

    Attributes:
        size: the number of samples, N.
        side: height and width, (H, W), in pixels.
        images: the tensors (N, C, H, W) that are images, by their ids.
        targets: by their ids, the other tensors (..., H, W), such as masks.
    """

    size: int
    side: Side
    images: frozenset[int]
    targets: frozenset[int]


def find_images(batch: Any, keys: Sequence[str | int] | None, *, who: str, beside: Collection[int] = ()) -> Images:
    """Find the images of a batch of any make: its 4-D tensors of floating point, or of uint8 where there are none.

    Args:
        batch: tensors in a dict, tuple, list or dataclass, nested as they may be, or one tensor.
        keys: names or positions of the tensors (N, C, H, W) that are images, and of no others.
        who: the technique's name, for messages.
        beside: ids of tensors that are none, such as labels.

    Raises:
        ValueError: if there are none, if they are not of one number and one size, if their channels come last, or if
            ``keys`` name no such tensor; with what was found.
    """
    named = tensors(batch)
    listed = (
        ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in named) or "no tensors"
    )
    mend = "Say by keys= which tensors (N, C, H, W) are images, by name or position, or take the technique out."
    if keys is None:
        four = [(path, t) for path, t in named if t.ndim == 4 and min(t.shape) > 0 and id(t) not in beside]
        chosen = [(path, t) for path, t in four if t.is_floating_point()]
        chosen = chosen or [(path, t) for path, t in four if t.dtype == torch.uint8]
        if not chosen:
            raise ValueError(
                f"{who}: found no images in the batch: {listed}; expected a tensor (N, C, H, W) of floating point or uint8."
                f" {mend}"
            )
    else:
        chosen = [(path, t) for path, t in named if any(lies_at(path, key) for key in keys)]
        missing = [key for key in keys if not any(lies_at(path, key) for path, _ in named)]
        wrong = [path for path, t in chosen if t.ndim != 4 or not (t.is_floating_point() or t.dtype == torch.uint8)]
        if missing or wrong:
            what = (
                f"{missing} are not in the batch"
                if missing
                else f"{wrong} are no (N, C, H, W) of floating point or uint8"
            )
            raise ValueError(f"{who}(keys={list(keys)}): {what}; it holds {listed}. {mend}")
    for path, t in chosen:
        if t.shape[3] in (1, 3, 4) and min(t.shape[1:3]) > 4:
            raise ValueError(
                f"{who}: {path or 'the batch'} {tuple(t.shape)} has its channels last; expected (N, C, H, W). Let the data set"
                " permute its images (channels may lie last in memory, as torch.channels_last has it)."
            )
    shapes = sorted({(t.shape[0], *t.shape[2:]) for _, t in chosen})
    if len(shapes) > 1:
        raise ValueError(f"{who}: the batch's images differ in (N, H, W), {shapes}: {listed}. {mend}")
    size, *side = shapes[0]
    height, width = side
    images = frozenset(id(t) for _, t in chosen)
    targets = frozenset(
        id(t) for _, t in named if t.ndim >= 3 and t.shape[-2:] == (height, width) and id(t) not in images
    )
    return Images(size, (height, width), images, targets)


def check_coordinates(batch: Any, *, who: str) -> None:
    """Raise ``ValueError`` where what is called boxes or keypoints counts pixels: they would not shrink with the images."""
    for path, t in tensors(batch):
        name = re.sub(r"^.*?(\w+)'?\]?$", r"\1", path)
        if _PIXELS.search(name) and t.numel() and t.dtype != torch.bool and float(t.max()) > 2:
            raise ValueError(
                f"{who}: {path} {tuple(t.shape)} holds places in pixels, up to {float(t.max()):g}, which would be wrong in"
                " smaller images; expected shares of the side, in [0, 1]. Normalise them in the data set, or take the"
                " technique out."
            )


def smaller(batch: Any, found: Images, side: Side, fn: Filter) -> Any:
    """The batch, of the same make, at ``side``: images as ``fn`` makes them, what lies on their pixels by the nearest."""

    def at_side(t: Tensor) -> Tensor:
        if id(t) in found.images:
            return filtered(t, side, fn)
        return nearest(t, side) if id(t) in found.targets else t

    return map_tensors(batch, at_side)


def side_of(full: Side, share: float, multiple_of: Side) -> Side:
    """Height and width at ``share`` of the full ones: the nearest multiples, at least one of them and at most the full.

    The full size itself where ``share`` is 1.
    """
    if share >= 1.0:
        return full
    height, width = (
        min(max(round(size * share / unit), 1) * unit, size) for size, unit in zip(full, multiple_of, strict=True)
    )
    return height, width
