"""Stretches of a run in which nothing else worked on the machine: there wall-clock tells whether the prices hold."""

import os
import time

from lightning_eff.bench.running.placement import busy_ticks

STRETCH = 0.5  # seconds of training in a stretch
OTHERS = 0.1  # of one core is what others may take, on average, in a quiet one


class Quiet:
    """Sums wall-clock and priced seconds over the quiet stretches of a run.

    A stretch is quiet where the system's cores were busy with hardly anything but this process (Linux's ``/proc/stat``,
    which also holds what a hypervisor took). Processes of a loader count as others. Where the system does not tell how
    busy it is, no stretch is known to be quiet.
    """

    def __init__(self) -> None:
        self.stretches = self.quiet = 0
        self.wall = self.priced = 0.0
        self._tick = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
        self.begin()

    def begin(self) -> None:
        """A stretch begins now; what was left of the one before is dropped."""
        self._own_wall = self._own_priced = 0.0
        self._start, self._used, self._busy = time.perf_counter(), time.process_time(), self._worked()

    def step(self, wall: float, priced: float) -> None:
        """A step took ``wall`` seconds, and its price is ``priced``."""
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
        """As JSON."""
        return {"stretches": self.stretches, "quiet": self.quiet, "wall_seconds": self.wall, "seconds": self.priced}

    def _worked(self) -> float | None:
        """Seconds that all cores have worked so far; None where the system does not tell."""
        ticks = busy_ticks()
        return sum(ticks.values()) * self._tick if ticks else None
