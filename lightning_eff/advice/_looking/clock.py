"""How long steps, the waiting for their data, their metrics and validation batches take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any

import torch
import torchmetrics

from lightning_eff.advice._looking.frames import Place, place
from lightning_eff.advice._running.stopwatch import queued_seconds

Mark = float | torch.cuda.Event


class Clock:
    """Marks moments of a run. On CUDA these are events, so the gap between two steps is the time in which the device idles.

    Args:
        device: that the run computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Mark:
        if not self._cuda:
            return perf_counter() - queued_seconds()  # other programs do not slow the user's run when it is alone
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(start: Mark, end: Mark) -> float:
        """Seconds, read after the run."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        assert isinstance(start, float) and isinstance(end, float)
        return end - start


class Times:
    """The times of a run's steps and validation batches."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._ended: Mark | None = None
        self._began: Mark | None = None
        self._validating: Mark | None = None
        self._timed: list[tuple[Mark, Mark, Mark]] = []  # the last one's end, this one's begin and end
        self._slowed: list[tuple[Mark, Mark, Mark]] = []  # of steps that were watched closely
        self._batches: list[tuple[Mark, Mark]] = []
        self.metric_seconds = 0.0
        self.metrics: dict[str, Place | None] = {}
        self._measuring = False

    def begin_step(self) -> None:
        self._began = self._clock.now()

    def end_step(self, *, close: bool) -> None:
        now = self._clock.now()
        if self._ended is not None and self._began is not None:
            (self._slowed if close else self._timed).append((self._ended, self._began, now))
        self._ended = now

    def interrupt(self) -> None:
        """Count the time until the next step for no step: it belongs to a validation or an epoch's end."""
        self._ended = None

    def begin_validation_batch(self) -> None:
        self._validating = self._clock.now()

    def end_validation_batch(self) -> None:
        if self._validating is not None:
            self._batches.append((self._validating, self._clock.now()))
        self._validating = None

    @property
    def timed(self) -> int:
        """How many steps were timed that were not watched closely."""
        return len(self._timed)

    @property
    def _steps(self) -> list[tuple[Mark, Mark, Mark]]:
        """The steps that count. If all were watched closely, the fraction of waiting comes out too small."""
        return self._timed if len(self._timed) >= 3 else self._slowed[1:]

    @property
    def known(self) -> bool:
        """Whether there are enough of them."""
        return len(self._steps) >= 3 and self.step() > 0

    def step(self) -> float:
        """Seconds of a step, from the end of the last one."""
        return median(self._clock.between(before, end) for before, _, end in self._steps)

    def waiting(self, workers: int | None) -> tuple[float, float]:
        """Seconds of a step that pass before its batch is there, and those of the whole step.

        Without workers each batch is waited for alike, so the lower quartile leaves out what other processes disturb. With
        workers some batches are there at once and others are not, so the mean counts.

        Args:
            workers: of the loader; None if it does not tell.
        """
        waits = [self._clock.between(before, begin) for before, begin, _ in self._steps]
        steps = [self._clock.between(before, end) for before, _, end in self._steps]
        if workers == 0:
            return quantiles(waits, n=4)[0], median(steps)
        return (fmean(waits), fmean(steps)) if workers else (median(waits), median(steps))

    def validation_batch(self) -> float | None:
        """Seconds of a validation batch; the first one is slower than the others."""
        later = self._batches[1:]
        return min(self._clock.between(*one) for one in later) if later else None

    @contextmanager
    def metrics_of_a_step(self, own: frozenset[str]) -> Iterator[None]:
        """Time what torchmetrics computes meanwhile."""
        methods = {name: getattr(torchmetrics.Metric, name) for name in ("forward",)}

        def timed(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(metric: torchmetrics.Metric, *args: Any, **kwargs: Any) -> Any:
                if self._measuring:
                    return method(metric, *args, **kwargs)
                self._measuring = True
                since = perf_counter()
                try:
                    return method(metric, *args, **kwargs)
                finally:
                    self.metric_seconds += perf_counter() - since
                    self._measuring = False
                    name = type(metric).__name__
                    if name not in self.metrics:
                        self.metrics[name] = place(own)

            return call

        for name, method in methods.items():
            setattr(torchmetrics.Metric, name, timed(method))
        try:
            yield
        finally:
            for name, method in methods.items():
                setattr(torchmetrics.Metric, name, method)
