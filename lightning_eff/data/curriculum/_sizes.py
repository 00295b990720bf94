"""Counts the steps that a run takes at each size, for its report."""

from collections.abc import Callable
from typing import Any

from lightning_eff._core.steps import Step


class SizesUsed:
    """The sizes of a run, with the first step and the number of steps of each.

    Attributes:
        counts: by size, in the order of use.
    """

    def __init__(self) -> None:
        self.counts: dict[Any, list[int]] = {}
        self._last_step = -1

    def count(self, step: Step, size: Any) -> None:
        """Count a step at this size. Micro-batches and scoring passes of one step count once."""
        if step.global_step != self._last_step:
            self._last_step = step.global_step
            self.counts.setdefault(size, [step.global_step, 0])[1] += 1

    def summary(self, text: Callable[[Any], str], *, final: Any, in_order: bool = False) -> str:
        """List the sizes with their numbers of steps, at most four of them.

        Args:
            text: formats a size.
            final: the full size if the last step had it, or None.
            in_order: sort by size.
        """
        if not self.counts:
            return "no step taken"
        used = sorted(self.counts.items()) if in_order else [*self.counts.items()]
        parts = [f"{text(size)} for {steps:,}" for size, (_, steps) in used]
        parts[0] += " step" if used[0][1][1] == 1 else " steps"
        size, (first, _) = used[-1]
        if size == final:
            parts[-1] = f"{text(size)} from step {first:,} on"
        return ", ".join(parts if len(parts) <= 6 else [*parts[:2], f"({len(parts) - 4} more)", *parts[-2:]])

    def state_dict(self) -> dict[str, Any]:
        """The state, to merge into the technique's own."""
        return {"last_step": self._last_step, "used": {size: list(counts) for size, counts in self.counts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._last_step = state["last_step"]
        self.counts = {size: list(counts) for size, counts in state["used"].items()}
