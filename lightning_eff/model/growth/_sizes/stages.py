"""The stages of a network that grows: pairs (fraction of the budget, size)."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lightning_eff._core.search_space import RunProfile

Size = TypeVar("Size", int, float)


def size_at(stages: Sequence[tuple[float, Size]], u: float) -> Size:
    """Return the size at ``u`` in [0, 1]: that of the last pair whose fraction is not above it."""
    return next(size for fraction, size in reversed(stages) if u >= fraction - 1e-9)


def doubling(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Make a technique whose stages double from ``first``, a fraction of all blocks, and end at ``until`` of the budget."""
    counts = [max(round(values["first"] * profile.num_blocks), 1)]
    while counts[-1] < profile.num_blocks:
        counts.append(min(2 * counts[-1], profile.num_blocks))
    stages = [(values["until"] * i / max(len(counts) - 1, 1), count) for i, count in enumerate(counts)]
    return cls(stages=stages, init=values["init"], copy_optimizer_state=values["copy_optimizer_state"])
