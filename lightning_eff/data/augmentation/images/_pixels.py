"""The values of pixels: from the range that the module trains on to [0, 1], where operations are defined, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Kind, Number

SLACK = 0.05  # the fraction of the range by which resizing may overshoot it


@dataclass(frozen=True, repr=False)
class PerChannel(Kind):
    """A number, or a sequence of numbers, one for each channel.

    Attributes:
        of: the kind of each number.
    """

    of: Number

    @property
    @override
    def expected(self) -> str:
        return f"{self.of.expected}, or a list of them"

    @override
    def __call__(self, value: Any) -> float | tuple[float, ...]:
        if not isinstance(value, Sequence):
            return self.of(value)
        if isinstance(value, str) or not value:
            raise ValueError
        return tuple(self.of(one) for one in value)


Mean = Annotated[float | Sequence[float], PerChannel(Number())]
Std = Annotated[float | Sequence[float], PerChannel(Number(above=0))]
Scale = Annotated[float, Number(above=0)]
Fill = Annotated[float, Fraction()]


class Pixels:
    """The map ``p = (x std + mean) / scale`` of pixels ``x`` to [0, 1]. For uint8 images it is always ``p = x / 255``.

    Args:
        mean: the value that the data set subtracts, one number or one per channel.
        std: the value that it divides by, one number or one per channel.
        scale: the largest value of pixels before that, such as 1 or 255.
        who: the technique's name, for messages.
    """

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float], scale: float, *, who: str) -> None:
        self.mean, self.std, self.scale, self.who = mean, std, scale, who

    def fits(self, images: Tensor) -> None:
        """Raise ``ValueError`` if images (B, C, H, W) are not within the expected range of values."""
        channels = images.shape[1]
        for name, value in (("mean", self.mean), ("std", self.std)):
            if isinstance(value, Sequence) and len(value) not in (1, channels):
                raise ValueError(
                    f"{self.who}({name}={list(value)}): the images {tuple(images.shape)} have {channels} channels. Give one"
                    " number, or one for each channel."
                )
        if images.dtype == torch.uint8 or not images.numel():
            return
        p = self.whole(images)
        low, high = float(p.amin()), float(p.amax())
        found = (
            f"{self.who}(mean={self.mean}, std={self.std}, scale={self.scale:g}): the images have values from"
            f" {float(images.amin()):.4g} to {float(images.amax()):.4g}, which with these settings are {low:.4g} to {high:.4g}"
            " of the range from black to white"
        )
        mend = (
            "Set mean= and std= to the values with which the data set normalises, and scale=255 if pixels go up to 255 before"
            " that (uint8 images need none of them)."
        )
        if not (low >= -SLACK and high <= 1 + SLACK):
            raise ValueError(f"{found}, and not within 0 to 1. {mend}")
        if high > low and max(abs(low), abs(high)) <= 2 / 255:
            raise ValueError(f"{found}, so they would be black. {mend}")

    def whole(self, images: Tensor) -> Tensor:
        """Return ``p``, at least float32. Values are outside of [0, 1] if the images are outside of their range."""
        if images.dtype == torch.uint8:
            return images.float() / 255
        x = images if images.dtype == torch.float64 else images.float()
        return (x * self._of(self.std, x) + self._of(self.mean, x)) / self.scale

    def back(self, p: Tensor, like: Tensor) -> Tensor:
        """Return ``x = (p scale - mean) / std`` in the dtype of ``like``, rounded if that is uint8."""
        if like.dtype == torch.uint8:
            return (p * 255).round().clamp(0, 255).to(torch.uint8)
        return ((p * self.scale - self._of(self.mean, p)) / self._of(self.std, p)).to(like.dtype)

    def _of(self, value: float | Sequence[float], x: Tensor) -> Any:
        if not isinstance(value, Sequence):
            return value
        return torch.tensor(list(value), dtype=x.dtype, device=x.device)[:, None, None]


def beyond(p: Tensor) -> Tensor:
    """Return the fraction of values outside of [0, 1], beyond rounding errors, on the device of ``p``."""
    return ((p < -1e-3) | (p > 1 + 1e-3)).float().mean()
