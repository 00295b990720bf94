"""Rehearsals of a bench in processor time, for a machine that other programs keep busy."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from lightning_eff.bench import benchmark, pacer
from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.workers import InProcess, Workers


class ByProcessor(Workers):
    """Rehearse in this process, and count the processor time of each arm's thread instead of seconds on the wall.

    On one torch thread, a step's work is all in that thread. Steps that another program interrupts then cost no more.
    """

    @override
    def together(
        self, jobs: Sequence[Job], progress: Callable[[Job, float], None]
    ) -> Iterator[tuple[Job, dict[str, Any]]]:
        clock = pacer.time
        pacer.time = SimpleNamespace(perf_counter=time.thread_time)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield from InProcess().together(jobs, progress)
        finally:
            pacer.time = clock


def rehearse() -> None:
    """Let all benches of this process rehearse so. Runs have their own processes, as before."""
    benchmark.Workers = ByProcessor
