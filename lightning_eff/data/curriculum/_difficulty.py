"""The difficulty of a sample by itself: its length."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MASKS = ("attention_mask",)
TOKENS = ("input_ids", "tokens", "ids")


def sample_length(sample: Any, *, asked: str = "DifficultyPacing(score='length')", mend: str = "score=") -> int:
    """Count the tokens of one sample, as the data set returns it.

    These are the ones of its ``attention_mask``, or else the length of its ``input_ids`` (``tokens``, ``ids``), or else of its
    first sequence of integers: a 1-D tensor or array, or a list of numbers.

    Args:
        sample: the sample, of any type.
        asked: the technique with its setting, for messages.
        mend: the argument that takes a number for each sample, for messages.

    Raises:
        ValueError: if it has no sequence of integers.
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
            f"{asked}: found no sequence of integers in a sample of the data set ({held}); expected its tokens as a 1-D tensor,"
            f" array or list, such as input_ids. Or give {mend} one number for each sample."
        )
    return len(found[0][1])


def _sequences(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """Find every sequence of integers in ``value``, each with its name."""
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
