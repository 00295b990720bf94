"""Seconds by phase, where each moment belongs to one phase; on CUDA by events that are read later."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

PHASES = ("data", "forward", "backward", "optimizer", "extra", "other")
Record = TypeVar("Record")
Seconds = defaultdict[str, float]  # by phase


class PhaseClock(Generic[Record]):
    """Split each step's time among phases. The phase that was entered last counts, until it is left.

    On a CPU, extra passes measure their own time, which is taken from the phase in which they ran. On CUDA, where the host
    runs ahead, phases are the stretches of the device's stream between events, including marked extra passes. Nothing waits
    for the device before :meth:`stop`.

    Args:
        device: the device that the run computes on.
        extra: a function that returns the seconds of extra passes so far; CPU only.
        done: called with each step's record and its seconds by phase, in order, as soon as they are known.
    """

    def __init__(
        self, device: torch.device, extra: Callable[[], float], done: Callable[[Record, Seconds], None]
    ) -> None:
        self.cuda = device.type == "cuda"
        self._extra = extra
        self._done = done
        self._phases = ["other"]
        self._step: Seconds = defaultdict(float)
        self._stretches: list[tuple[str, torch.cuda.Event]] = []  # on CUDA, each with its final event
        self._waiting: deque[tuple[Record, torch.cuda.Event, list[tuple[str, torch.cuda.Event]]]] = deque()
        self._last = time.perf_counter()
        self._last_extra = extra()
        self._first = self._event() if self.cuda else None

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def phase(self) -> str:
        return self._phases[-1]

    def mark(self, phase: str | None = None) -> None:
        """Assign the time since the last mark to ``phase``; None is the current one."""
        phase = phase or self.phase
        if self.cuda:
            self._stretches.append((phase, self._event()))
            return
        now, extra = time.perf_counter(), self._extra()
        self._step[phase] += now - self._last - (extra - self._last_extra)
        self._step["extra"] += extra - self._last_extra
        self._last, self._last_extra = now, extra

    def enter(self, phase: str) -> None:
        """Begin ``phase``, until :meth:`leave`. Validation includes every phase that is entered within it.

        "data" is a phase only where no other has been entered: a pass that loads its own data is one phase.
        """
        if self.phase == "validation" or (phase == "data" and len(self._phases) > 1):
            phase = self.phase
        if phase != self.phase:
            self.mark()
        self._phases.append(phase)

    def leave(self) -> None:
        """End the phase that was entered last, and continue the one around it."""
        if len(self._phases) == 1:
            return  # it was entered before the clock began
        if self._phases[-1] != self._phases[-2]:
            self.mark()
        self._phases.pop()

    def end_step(self, record: Record) -> None:
        """End the step."""
        self.mark()
        if not self.cuda:
            step, self._step = self._step, defaultdict(float)
            self._done(record, step)
            return
        assert self._first is not None
        self._waiting.append((record, self._first, self._stretches))
        self._first, self._stretches = self._stretches[-1][1], []
        self._harvest(wait=False)

    def _harvest(self, *, wait: bool) -> None:
        while self._waiting:
            record, begun, stretches = self._waiting[0]
            if wait:
                stretches[-1][1].synchronize()
            elif not stretches[-1][1].query():
                return
            step: Seconds = defaultdict(float)
            for phase, end in stretches:
                step[phase] += begun.elapsed_time(end) / 1e3
                begun = end
            self._waiting.popleft()
            self._done(record, step)

    def stop(self, record: Record) -> None:
        """End the run; on CUDA this waits for the device."""
        self.end_step(record)
        self._harvest(wait=True)
