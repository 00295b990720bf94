"""Arguments that augmentations share, checked; and runs in which none of them can help."""

import math
from collections.abc import Sequence

from lightning_eff._core.search_space import RunProfile


def check_number(value: float, *, who: str, name: str, low: float, high: float, what: str) -> None:
    """Raise ``ValueError`` unless it is a number in [low, high], or at least ``low`` where ``high`` is infinite."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or not math.isfinite(value):
        expected = f"a number in [{low:g}, {high:g}]" if math.isfinite(high) else f"a finite number >= {low:g}"
        raise ValueError(f"{who}({name}={value!r}): expected {expected}, {what}.")


def check_names(value: Sequence[str | int] | None, *, who: str, name: str) -> None:
    """Raise ``ValueError`` unless they are names or positions of tensors in the batch."""
    if value is not None and (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not value
        or any(isinstance(key, bool) or not isinstance(key, str | int) for key in value)
    ):
        raise ValueError(
            f"{who}({name}={value!r}): expected a list of names or positions in the batch, such as ['pixel_values'] or [0],"
            " or None to look for them."
        )


def too_few_epochs(profile: RunProfile) -> str | None:
    """Why more samples out of the same ones are pointless where each is hardly seen twice."""
    return None if profile.epochs >= 2 else "samples are hardly seen twice, so there is nothing to learn by heart"


def no_images(profile: RunProfile) -> str | None:
    """Why a technique that needs images would be tried in vain."""
    return "samples are no images" if profile.image_side is None else too_few_epochs(profile)


def no_mixing(profile: RunProfile) -> str | None:
    """Why a technique that mixes images and their labels would be tried in vain."""
    if not profile.visible_loss:
        return "the loss cannot be seen, so labels could not be mixed"
    return "a batch of one has nothing to mix" if profile.batch_size < 2 else no_images(profile)
