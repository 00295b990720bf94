"""Seconds by phase, each moment in one phase only; on CUDA by events that are read when they are over."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

PHASES = ("data", "forward", "backward", "optimizer", "extra", "other")
Record = TypeVar("Record")
Seconds = defaultdict[str, float]  # by phase


class PhaseClock(Generic[Record]):
    """Splits each step's time among phases: what is entered last counts, until it is left.

    On the CPU the time of extra passes is what their own account says, taken from the phase in which they ran. On CUDA,
    where the host runs ahead, phases are the stretches of the device's stream between events, extra passes among them
    where they were told of; nothing waits for the device before :meth:`stop`.

    Args:
        device: on which the run computes.
        extra: seconds of extra passes so far, by their own account; CPU only.
        done: called with each step's record and its seconds by phase, as soon as they are known; in order.
    """

    def __init__(
        self, device: torch.device, extra: Callable[[], float], done: Callable[[Record, Seconds], None]
    ) -> None:
        self.cuda = device.type == "cuda"
        self._extra = extra
        self._done = done
        self._phases = ["other"]
        self._step: Seconds = defaultdict(float)
        self._stretches: list[tuple[str, torch.cuda.Event]] = []  # on CUDA: each with the event at its end
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
        """What has passed since the last mark belongs to ``phase``; None is the present one."""
        phase = phase or self.phase
        if self.cuda:
            self._stretches.append((phase, self._event()))
            return
        now, extra = time.perf_counter(), self._extra()
        self._step[phase] += now - self._last - (extra - self._last_extra)
        self._step["extra"] += extra - self._last_extra
        self._last, self._last_extra = now, extra

    def enter(self, phase: str) -> None:
        """``phase`` begins, until :meth:`leave`. Validation takes in all that is entered within it.

        Data are a phase of their own only where nothing else has been entered: a pass that loads its own is one phase.
        """
        if self.phase == "validation" or (phase == "data" and len(self._phases) > 1):
            phase = self.phase
        if phase != self.phase:
            self.mark()
        self._phases.append(phase)

    def leave(self) -> None:
        """The phase entered last ends, and that around it goes on."""
        if len(self._phases) == 1:
            return  # it was entered before the clock began
        if self._phases[-1] != self._phases[-2]:
            self.mark()
        self._phases.pop()

    def end_step(self, record: Record) -> None:
        """The step is over."""
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
        """The run is over; on CUDA this waits for the device."""
        self.end_step(record)
        self._harvest(wait=True)
