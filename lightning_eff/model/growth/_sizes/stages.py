"""The stages of a network that grows, as the user gives them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_eff._core.search_space import RunProfile


def target_count(stages: Sequence[tuple[float, int]], u: float) -> int:
    """How many blocks run at ``u`` in [0, 1]: the count of the last stage whose fraction is not beyond it."""
    return next(count for fraction, count in reversed(stages) if u >= fraction - 1e-9)


def doubling(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Stages that double from the share ``first`` of all blocks on, the last of them at ``until`` of the budget."""
    counts = [max(round(values["first"] * profile.num_blocks), 1)]
    while counts[-1] < profile.num_blocks:
        counts.append(min(2 * counts[-1], profile.num_blocks))
    stages = [(values["until"] * i / max(len(counts) - 1, 1), count) for i, count in enumerate(counts)]
    return cls(stages=stages, init=values["init"], copy_optimizer_state=values["copy_optimizer_state"])


def checked_stages(stages: Any) -> list[tuple[float, int]]:
    """``stages`` as a list of pairs, or a ``ValueError`` that says what is wrong with them."""

    def fail(why: str) -> ValueError:
        return ValueError(
            f"ProgressiveStacking(stages={stages!r}): {why}; expected pairs (fraction of the budget in [0, 1), number"
            " of blocks >= 1), both growing, the first fraction 0, e.g. [(0.0, 3), (0.25, 6), (0.5, 12)]."
        )

    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise fail(f"got {type(stages).__name__}" if stages else "there is no stage")
    pairs: list[tuple[float, int]] = []
    for stage in stages:
        if not isinstance(stage, Sequence) or isinstance(stage, str) or len(stage) != 2:
            raise fail(f"{stage!r} is no pair")
        fraction, count = stage
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0.0 <= fraction < 1.0:
            raise fail(f"the fraction {fraction!r} is not in [0, 1)")
        if isinstance(count, bool) or not isinstance(count, int | float) or count != int(count) or count < 1:
            raise fail(f"{count!r} is no number of blocks")
        pairs.append((float(fraction), int(count)))
    if pairs[0][0] != 0.0:
        raise fail(f"the first stage starts at {pairs[0][0]}, and nothing says how many blocks run before")
    for (before, fewer), (after, more) in pairwise(pairs):
        if after <= before:
            raise fail(f"the fraction {after} does not come after {before}")
        if more <= fewer:
            raise fail(f"{fewer} blocks shrink to {more}" if more < fewer else f"{more} blocks do not grow")
    return pairs
