"""A progress bar over a bench's whole plan, with the time that is left."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from lightning_eff.bench.jobs import Job


class PlanBar:
    """Counts budget seconds: those of the runs that are planned, and those that rehearsals take.

    Args:
        total: the runs' seconds.
        enabled: show it.
    """

    def __init__(self, total: float, *, enabled: bool) -> None:
        self._lock = threading.Lock()
        self._shares: dict[str, float] = {}
        self._bar: Any = tqdm(
            total=total,
            disable=not enabled,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            dynamic_ncols=True,
        )

    def stage(self, name: str, jobs: Sequence[Job]) -> None:
        """The next jobs."""
        self._bar.set_description_str(f"{name}: {len(jobs)} to do" if jobs else name)

    def update(self, job: Job, share: float) -> None:
        """A job is done to this share."""
        with self._lock:
            before = self._shares.get(job.name, 0.0)
            self._shares[job.name] = share
            self._bar.set_postfix_str(f", {job.arm.name}, seed {job.seed}", refresh=False)
            if job.pace.sweep is None:
                self._bar.update((share - before) * job.pace.budget)
            elif share >= 1.0:
                self._bar.refresh()

    def skip(self, job: Job) -> None:
        """A job was done before: its seconds are not counted as speed."""
        if job.pace.sweep is None:
            with self._lock:
                self._shares[job.name] = 1.0
                self._bar.total = max(self._bar.total - job.pace.budget, 1e-9)
                self._bar.refresh()

    def done(self, job: Job, record: Mapping[str, Any]) -> None:
        """A job ended, well or not."""
        self.update(job, 1.0)
        if record["status"] != "finished":
            self._bar.write(f"{job.arm.name}, seed {job.seed}: {record['status']}: {record['error']}")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
