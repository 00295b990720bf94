"""What values pixels have: from the range that the module trains on to [0, 1], where operations are defined, and back."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_eff.data.augmentation._arguments import check_number

SLACK = 0.05  # of the range: by so much may resizing overshoot it


class Pixels:
    """The map ``p = (x std + mean) / scale`` of pixels ``x`` to [0, 1]; images of uint8 are ``p = x / 255`` whatever it says.

    Args:
        mean: that the data set has subtracted, one number or one for each channel.
        std: that it has divided by.
        scale: the largest value that pixels had before, such as 1 or 255.
        who: the technique's name, for messages.
    """

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float], scale: float, *, who: str) -> None:
        for name, value in (("mean", mean), ("std", std)):
            several = isinstance(value, Sequence) and not isinstance(value, str) and value
            listed: list[Any] = list(cast("Sequence[float]", value)) if several else [value]
            for one in listed:
                low, what = (-float("inf"), "or one for each channel") if name == "mean" else (0.0, "above 0")
                check_number(one, who=who, name=name, low=low, high=float("inf"), what=what)
                if name == "std" and one == 0:
                    raise ValueError(f"{who}({std=}): expected numbers above 0, by which the data set divides.")
        check_number(scale, who=who, name="scale", low=0, high=float("inf"), what="above 0, such as 1 or 255")
        if scale == 0:
            raise ValueError(f"{who}({scale=}): expected a number above 0, such as 1 or 255.")
        self.mean, self.std, self.scale, self.who = mean, std, scale, who

    def fits(self, images: Tensor) -> None:
        """Raise ``ValueError`` if images as these, (B, C, H, W), are not of this range; with what they are."""
        channels = images.shape[1]
        for name, value in (("mean", self.mean), ("std", self.std)):
            if isinstance(value, Sequence) and len(value) not in (1, channels):
                raise ValueError(
                    f"{self.who}({name}={list(value)}): the images {tuple(images.shape)} have {channels} channels; expected"
                    " one number, or one for each channel."
                )
        if images.dtype == torch.uint8 or not images.numel():
            return
        p = self.whole(images)
        low, high = float(p.amin()), float(p.amax())
        told = (
            f"{self.who}(mean={self.mean}, std={self.std}, scale={self.scale:g}): the images' values, from"
            f" {float(images.amin()):.4g} to {float(images.amax()):.4g}, are {low:.4g} to {high:.4g} of the range from black"
            " to white"
        )
        mend = (
            "Give mean= and std= by which the data set normalises, and scale=255 where it does so with values up to 255"
            " (images of uint8 need none of them)."
        )
        if not (low >= -SLACK and high <= 1 + SLACK):
            raise ValueError(f"{told}; expected 0 to 1. {mend}")
        if high > low and max(abs(low), abs(high)) <= 2 / 255:
            raise ValueError(f"{told}, which would be black; expected that they fill it. {mend}")

    def whole(self, images: Tensor) -> Tensor:
        """``p``, of float32 or above, beyond [0, 1] where images are beyond their range."""
        if images.dtype == torch.uint8:
            return images.float() / 255
        x = images if images.dtype == torch.float64 else images.float()
        return (x * self._of(self.std, x) + self._of(self.mean, x)) / self.scale

    def back(self, p: Tensor, like: Tensor) -> Tensor:
        """``x = (p scale - mean) / std``, of the type of ``like``: rounded where that is uint8."""
        if like.dtype == torch.uint8:
            return (p * 255).round().clamp(0, 255).to(torch.uint8)
        return ((p * self.scale - self._of(self.mean, p)) / self._of(self.std, p)).to(like.dtype)

    def _of(self, value: float | Sequence[float], x: Tensor) -> Any:
        if not isinstance(value, Sequence):
            return value
        return torch.tensor(list(value), dtype=x.dtype, device=x.device)[:, None, None]


def beyond(p: Tensor) -> Tensor:
    """The share of values that lie outside of [0, 1] by more than what rounding does, on the device of ``p``."""
    return ((p < -1e-3) | (p > 1 + 1e-3)).float().mean()
