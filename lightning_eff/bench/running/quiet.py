"""Find stretches of a run on an otherwise idle machine, in which wall-clock time checks the step costs."""

import os
import time

from lightning_eff.bench.running.placement import busy_ticks

STRETCH = 0.5  # the training seconds of a stretch
OTHERS = 0.1  # the most that other processes may use of one core, on average, in a quiet stretch


class Quiet:
    """Sum wall-clock and budget seconds over the quiet stretches of a run.

    A stretch is quiet if other processes hardly used the cores, by Linux's ``/proc/stat``, which includes the time that a
    hypervisor took. A loader's processes count as others. On systems that do not report their load, no stretch is quiet.
    """

    def __init__(self) -> None:
        self.stretches = self.quiet = 0
        self.wall = self.priced = 0.0
        self._tick = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
        self.begin()

    def begin(self) -> None:
        """Begin a stretch, and drop an unfinished one."""
        self._own_wall = self._own_priced = 0.0
        self._start, self._used, self._busy = time.perf_counter(), time.process_time(), self._worked()

    def step(self, wall: float, priced: float) -> None:
        """Add a step of ``wall`` seconds whose step cost is ``priced``."""
        self._own_wall += wall
        self._own_priced += priced
        if self._own_wall < STRETCH:
            return
        elapsed, used, busy = time.perf_counter() - self._start, time.process_time() - self._used, self._worked()
        self.stretches += 1
        if self._busy is not None and busy is not None and busy - self._busy - used <= OTHERS * elapsed:
            self.quiet += 1
            self.wall += self._own_wall
            self.priced += self._own_priced
        self.begin()

    def record(self) -> dict[str, float]:
        """Return the sums as JSON values."""
        return {"stretches": self.stretches, "quiet": self.quiet, "wall_seconds": self.wall, "seconds": self.priced}

    def _worked(self) -> float | None:
        """Return the busy seconds of all cores so far, or None if the system does not report them."""
        ticks = busy_ticks()
        return sum(ticks.values()) * self._tick if ticks else None
