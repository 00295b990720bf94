"""The metrics that a module logged in a step."""

from typing import Any

from lightning.pytorch import Trainer


class Logged:
    """Distinguishes the metrics that a step logged from those left over from an earlier step."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def of_a_step(self, trainer: Trainer) -> tuple[set[str], set[str]]:
        """The metrics that the step logged for the progress bar, and for the logger."""
        bar: set[str] = set()
        log: set[str] = set()
        for key, metric in dict(getattr(trainer, "_results", None) or {}).items():
            meta, value = getattr(metric, "meta", None), getattr(metric, "_forward_cache", None)
            if meta is None or not meta.on_step or value is None or value is self._last.get(key):
                continue
            self._last[key] = value
            bar |= {meta.name} if meta.prog_bar else set()
            log |= {meta.name} if meta.logger else set()
        return bar, log
