"""The time of an advice, and a bar that shows the current trial and the time left."""

import sys
import time
from typing import Any

from tqdm import tqdm


class _Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
    """A bar that starts no thread."""

    monitor_interval = 0


class Watchman:
    """Divides the time among the parts of an advice.

    Args:
        seconds: in all.
        enabled: show a bar; where the output is no terminal, a line for each part.
    """

    def __init__(self, seconds: float, *, enabled: bool) -> None:
        self.seconds, self._began = seconds, time.monotonic()
        self._enabled, self._doing, self._shown = enabled, "", 0
        postfix: Any = ["starts"]
        self._bar: Any = _Bar(
            total=round(seconds),
            disable=not (enabled and sys.stderr.isatty()),
            bar_format="advise {percentage:3.0f}%|{bar}| {postfix[0]}",
            postfix=postfix,
            dynamic_ncols=True,
            mininterval=0.2,
            leave=False,
        )

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.seconds - self.spent

    def until(self, share: float) -> float:
        """When this fraction of the time is used, by :func:`time.monotonic`."""
        return self._began + share * self.seconds

    def say(self, text: str = "") -> None:
        """Show the current work and the time left."""
        left = max(self.left, 0.0)
        told = f"{int(left // 60)}:{int(left % 60):02d} left, {text or self._doing}"
        if text and self._enabled and self._bar.disable:
            print(f"advise: {told}", file=sys.stderr, flush=True)
        self._doing = text or self._doing
        if not self._bar.disable:
            done = min(round(self.spent), round(self.seconds))
            self._bar.postfix[0] = told
            self._bar.update(max(done - self._shown, 0))
            self._shown = max(done, self._shown)
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
