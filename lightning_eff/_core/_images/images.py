"""Images in batches of any structure: find them by shape, and shrink them together with masks of the same size."""

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
    """Resize floating-point images (N, C, H, W) to ``side``, bilinearly with antialiasing, as image libraries do."""
    return F.interpolate(images, size=side, mode="bilinear", align_corners=False, antialias=True)


def nearest(t: Tensor, side: Side) -> Tensor:
    """Resize ``t`` (..., H, W) of any dtype to ``side``: each new pixel is the old one that contains its centre."""
    for dim, size in zip((-2, -1), side, strict=True):
        full = t.shape[dim]
        centres = (torch.arange(size, dtype=torch.float64) + 0.5) * (full / size)
        t = t.index_select(dim, centres.long().clamp(max=full - 1).to(t.device))
    return t


def filtered(images: Tensor, side: Side, fn: Filter) -> Tensor:
    """Apply ``fn`` to images in float32 or higher, and return their own dtype and memory format.

    Pixels of uint8 are rounded and clamped to 0 to 255.
    """
    exact = images if images.dtype in (torch.float32, torch.float64) else images.float()
    out = fn(exact, side)
    if images.dtype == torch.uint8:
        out = out.round().clamp(0, 255)
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return out.to(images.dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@dataclass(frozen=True)
class Images:
    """The images of a batch.

    Attributes:
        size: the number of samples, N.
        side: height and width, (H, W), in pixels.
        images: the ids of the image tensors (N, C, H, W).
        targets: the ids of other tensors (..., H, W), such as masks.
    """

    size: int
    side: Side
    images: frozenset[int]
    targets: frozenset[int]


def find_images(batch: Any, keys: Sequence[str | int] | None, *, who: str, beside: Collection[int] = ()) -> Images:
    """Find the images of a batch of any structure: its 4-D floating-point tensors, or uint8 tensors if there are none.

    Args:
        batch: tensors in a dict, tuple, list or dataclass, also nested, or one tensor.
        keys: names or positions of the image tensors (N, C, H, W), and of no others.
        who: the technique's name, for messages.
        beside: ids of tensors that are not images, such as labels.

    Raises:
        ValueError: if there are none, if they differ in number or size, if their channels are last, or if ``keys`` name no
            such tensor; with the tensors found.
    """
    named = tensors(batch)

    def listed() -> str:
        held = (f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in named)
        return ", ".join(held) or "no tensors"

    mend = "Set keys= to the names or positions of the image tensors (N, C, H, W), or remove the technique."
    if keys is None:
        four = [(path, t) for path, t in named if t.ndim == 4 and min(t.shape) > 0 and id(t) not in beside]
        chosen = [(path, t) for path, t in four if t.is_floating_point()]
        chosen = chosen or [(path, t) for path, t in four if t.dtype == torch.uint8]
        if not chosen:
            raise ValueError(
                f"{who}: found no images in the batch: {listed()}; expected a tensor (N, C, H, W) of floating point or uint8."
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
                else f"{wrong} are not (N, C, H, W) of floating point or uint8"
            )
            raise ValueError(f"{who}(keys={list(keys)}): {what}; it holds {listed()}. {mend}")
    for path, t in chosen:
        if t.shape[3] in (1, 3, 4) and min(t.shape[1:3]) > 4:
            raise ValueError(
                f"{who}: {path or 'the batch'} {tuple(t.shape)} has its channels last; expected (N, C, H, W). Let the data set"
                " permute its images (the memory format may be torch.channels_last)."
            )
    shapes = sorted({(t.shape[0], *t.shape[2:]) for _, t in chosen})
    if len(shapes) > 1:
        raise ValueError(f"{who}: the batch's images differ in (N, H, W), {shapes}: {listed()}. {mend}")
    size, *side = shapes[0]
    height, width = side
    images = frozenset(id(t) for _, t in chosen)
    targets = frozenset(
        id(t) for _, t in named if t.ndim >= 3 and t.shape[-2:] == (height, width) and id(t) not in images
    )
    return Images(size, (height, width), images, targets)


def check_coordinates(batch: Any, *, who: str) -> None:
    """Raise ``ValueError`` if tensors named boxes or keypoints are in pixels, because they would not shrink with the images."""
    for path, t in tensors(batch):
        name = re.sub(r"^.*?(\w+)'?\]?$", r"\1", path)
        if _PIXELS.search(name) and t.numel() and t.dtype != torch.bool and float(t.max()) > 2:
            raise ValueError(
                f"{who}: {path} {tuple(t.shape)} holds coordinates in pixels, up to {float(t.max()):g}, which would be wrong in"
                " smaller images; expected fractions of the side, in [0, 1]. Normalise them in the data set, or remove the"
                " technique."
            )


def smaller(batch: Any, found: Images, side: Side, fn: Filter) -> Any:
    """Return the batch in the same structure at ``side``: images resized by ``fn``, and targets by the nearest pixel."""

    def at_side(t: Tensor) -> Tensor:
        if id(t) in found.images:
            return filtered(t, side, fn)
        return nearest(t, side) if id(t) in found.targets else t

    return map_tensors(batch, at_side)


def side_of(full: Side, share: float, multiple_of: Side) -> Side:
    """Return height and width at ``share`` of the full ones, as the nearest multiples between one unit and the full size.

    If ``share`` is 1, it is the full size.
    """
    if share >= 1.0:
        return full
    height, width = (
        min(max(round(size * share / unit), 1) * unit, size) for size, unit in zip(full, multiple_of, strict=True)
    )
    return height, width
