"""A progress bar over a whole bench, with the time left."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from lightning_eff.bench.running.jobs import Job


class PlanBar:
    """Count the budget seconds of runs, and a twentieth of the budget per rehearsal.

    Args:
        total: the seconds of all runs.
        budget: the seconds of one run.
        rehearsals: the number of rehearsals.
        enabled: whether to show the bar.
    """

    def __init__(self, total: float, budget: float, rehearsals: int, *, enabled: bool) -> None:
        self._lock = threading.Lock()
        self._shares: dict[str, float] = {}
        self._rehearsal = budget / 20
        self._bar: Any = tqdm(
            total=total + rehearsals * self._rehearsal,
            disable=not enabled,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            dynamic_ncols=True,
            mininterval=0.5,
        )

    def stage(self, name: str, jobs: Sequence[Job]) -> None:
        """Begin the next jobs."""
        self._bar.set_description_str(f"{name}: {len(jobs)} to do" if jobs else name)

    def update(self, job: Job, share: float) -> None:
        """Record that a job is done to this fraction."""
        with self._lock:
            before = self._shares.get(job.name, 0.0)
            self._shares[job.name] = share
            self._bar.set_postfix_str(f"{job.arm.name}, seed {job.seed}", refresh=False)  # tqdm adds the comma
            left = self._bar.total - self._bar.n  # sums of fractions may exceed the total by rounding
            self._bar.update(min((share - before) * self._seconds(job), left))

    def skip(self, job: Job) -> None:
        """Leave out a job that an earlier process did, so that it does not count as speed."""
        with self._lock:
            self._shares[job.name] = 1.0
            self._bar.total = max(self._bar.total - self._seconds(job), 1e-9)
            self._bar.refresh()

    def done(self, job: Job, record: Mapping[str, Any]) -> None:
        """Record the end of a job, and print why it failed if it did."""
        self.update(job, 1.0)
        if record["status"] != "finished":
            self._bar.write(f"{job.arm.name}, seed {job.seed}: {record['status']}: {record['error']}")

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

    def _seconds(self, job: Job) -> float:
        return job.pace.budget if job.pace.sweep is None else self._rehearsal
