"""How difficult a sample is by itself: how long it is."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MASKS = ("attention_mask",)
TOKENS = ("input_ids", "tokens", "ids")


def sample_length(sample: Any, *, asked: str = "DifficultyPacing(score='length')", mend: str = "score=") -> int:
    """The tokens of one sample, as the data set gives it.

    The ones of its ``attention_mask``, or else the length of its ``input_ids`` (``tokens``, ``ids``), or of its first
    sequence of integers under any other name: a tensor or array of one dimension, or a list of numbers.

    Args:
        sample: any.
        asked: who asks, for messages.
        mend: the argument that takes a number for each sample, for messages.

    Raises:
        ValueError: if it holds none.
    """
    found = _sequences(sample, "")
    for name, values in found:
        if name in MASKS:
            return int((values != 0).sum())
    for name, values in found:
        if name in TOKENS:
            return len(values)
    if not found:
        held = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(
            f"{asked}: found no sequence of integers in a sample of the data set ({held}); expected"
            f" its tokens, a tensor, array or list of one dimension, such as input_ids. Give {mend} one number for"
            " each sample."
        )
    return len(found[0][1])


def _sequences(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """Every sequence of integers in ``value``, each with the name that it stands under."""
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _sequences(item, str(key))]
    if is_dataclass(value) and not isinstance(value, type):
        return [found for f in fields(value) for found in _sequences(getattr(value, f.name), f.name)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        return [(name, value)] if value.ndim == 1 and not value.is_floating_point() else []
    if isinstance(value, list | tuple) and value and all(isinstance(item, int | np.integer) for item in value):
        return [(name, torch.tensor([int(item) for item in value]))]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [found for item in value for found in _sequences(item, name)]
    return []
