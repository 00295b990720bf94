"""One job of a benchmark, in this process or in a worker: a rehearsal of an arm, or a run over the budget."""

import gc
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff.bench.arms import Arm, Built, ready
from lightning_eff.bench.inspection import acting
from lightning_eff.bench.pace import Diverged, Incomparable, Pace, Rehearsed
from lightning_eff.bench.pacer import Pacer
from lightning_eff.bench.running.turns import Stopped, in_turns
from lightning_eff.monitor.energy import EnergyMeter
from lightning_eff.monitor.machine import peak_memory, reset_peak_memory


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        arm: the arm.
        seed: the run's seed.
        pace: the pace of the run.
        name: a name that is unique in the bench and can be a file name.
        threads: the number of torch threads; 0 leaves it unchanged.
        limit: the wall-clock seconds after which a worker process is killed, which counts as a crash; None for no limit. The
            limits of jobs that take turns add up.
        patience: the wall-clock seconds after which the job gives up, with status "late"; None for no limit. It needs the main
            thread and a system with timers.
    """

    arm: Arm
    seed: int
    pace: Pace
    name: str
    threads: int = 0
    limit: float | None = None
    patience: float | None = None

    def record(self) -> dict[str, Any]:
        """Return the job as JSON values. Its arm must be built from configs."""
        return {**asdict(self), "arm": {**asdict(self.arm), "configs": []}}

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Job":
        """Return the job of a record."""
        arm = record["arm"]
        replaced = tuple(arm["replaced"]) if arm["replaced"] else None
        arm = Arm(**{**arm, "source": tuple(arm["source"]), "configs": (), "replaced": replaced})
        rest = {name: record[name] for name in ("seed", "name", "threads", "limit", "patience")}
        return cls(arm, pace=Pace(**record["pace"]), **rest)


class Late(BaseException):
    """A job took longer than its patience."""


#: The beginning of a job's error if its time limit ended it.
KILLED = "it was killed after"
#: The figures of a run that its record takes from its pacer.
SUMS = ("seconds", "wall_seconds", "setup_seconds", "warmup_seconds", "caused_seconds", "validation_seconds")
SUMS += ("extra_seconds", "forward_passes", "steps", "samples", "tokens")
Progress = Callable[[Job, float], None]


def work_all(jobs: Sequence[Job], progress: Progress) -> list[dict[str, Any]]:
    """Do jobs in turns of a few steps and return their records. A job that fails is tried again alone."""
    if not jobs:
        return []
    if len(jobs) == 1:
        return [work(jobs[0], lambda u: progress(jobs[0], u))]
    with undisturbed():
        tasks = [lambda turn, job=job: work(job, lambda u: progress(job, u), turn) for job in jobs]
        records = in_turns(tasks, max(job.threads for job in jobs))
    for i, job in enumerate(jobs):
        if records[i]["status"] != "finished":
            gc.collect()
            records[i] = work(job, lambda u, job=job: progress(job, u))
    return records


def work(
    job: Job, progress: Callable[[float], None] | None = None, pass_on: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Do a job and return its record as JSON values. An exception in the user's code becomes part of the record.

    Raises:
        KeyboardInterrupt: if interrupted.
    """
    pacer = Pacer(job.pace, progress, pass_on)
    status, error, built, energy = "finished", None, None, None
    device = torch.device("cpu")
    start = time.perf_counter()
    with undisturbed(), _threads(job.threads):
        alarm = _set_alarm(job.patience)
        try:
            reset_peak_memory(device)
            built = job.arm.build(job.seed)
            ready(built, pacer)
            device = built.trainer.strategy.root_device
            if device.type == "cuda":
                reset_peak_memory(device)
            with EnergyMeter(device) as meter:
                try:
                    built.trainer.fit(built.module, **built.data)
                finally:
                    pacer.release()
            energy = meter.joules
        except (KeyboardInterrupt, Stopped):
            raise
        except Rehearsed:
            pass
        except Late:
            status = "late"
        except Incomparable as exception:
            status, error = "refused", str(exception)
        except Diverged as exception:
            status, error = "diverged", str(exception)
        except SystemExit as exception:  # jsonargparse, on a config that it cannot read
            if isinstance(exception.__context__, KeyboardInterrupt):  # Lightning's way of ending an interrupted fit
                raise KeyboardInterrupt from None
            status, error = "crashed", f"SystemExit: {exception}; its messages are in the log"
        except BaseException as exception:
            status, error = "crashed", f"{type(exception).__name__}: {exception}"[:2000]
            traceback.print_exc()
        finally:
            alarm()
    record = {"name": job.name, "arm": job.arm.name, "seed": job.seed, "status": status, "error": error}
    if job.pace.sweep is not None:
        return {**record, **_rehearsal(job, pacer, built, time.perf_counter() - start)}
    return {**record, **_run(job, pacer, device, energy)}


def _rehearsal(job: Job, pacer: Pacer, built: Built | None, total: float) -> dict[str, Any]:
    record: dict[str, Any] = {
        **{name: getattr(pacer, name) for name in ("kinds", "times", "samples", "tokens", "steps", "losses")},
        "lr": pacer.rate(),
        "total_seconds": total,
        "validation_seconds": pacer.validation_seconds,
    }
    if job.pace.inspect and built is not None and pacer.points:
        record["metrics"] = pacer.metrics
        record["data"] = pacer.data(built.trainer)
        record["techniques"] = sorted(acting(built.trainer))
        record["facts"] = pacer.facts
        record["overlap"] = pacer.watched.overlap()
        record["ahead"] = pacer.ahead or 0
    return record


def _run(job: Job, pacer: Pacer, device: torch.device, energy: float | None) -> dict[str, Any]:
    peak, kind = peak_memory(device)
    notes: list[str] = []
    share = pacer.last_rate / pacer.rate()["peak"] if pacer.rate()["peak"] > 0 else 0.0
    if share > 0.1:
        notes.append(f"the learning rate ended at {share:.0%} of its peak")
    uncalibrated = pacer.uncalibrated / pacer.seconds if pacer.seconds else 0.0
    if uncalibrated > 0.05:
        notes.append(f"{uncalibrated:.0%} of its seconds went into kinds of steps that no rehearsal contained")
    return {
        "points": pacer.points,
        "losses": [list(point) for point in pacer.loss_curve()],
        "memory": [list(point) for point in pacer.memory],
        **{name: getattr(pacer, name) for name in SUMS},
        "peak_memory_bytes": peak,
        "memory_kind": kind,
        "energy_joules": energy,
        "lr_last_share": share,
        "uncalibrated_share": uncalibrated,
        "quiet": pacer.quiet.record(),
        "kinds": _by_kind(pacer),
        "overlap": pacer.watched.overlap(),
        "notes": notes,
    }


def _by_kind(pacer: Pacer) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    for kind, seconds in zip(pacer.kinds, pacer.times, strict=True):
        found.setdefault(kind, []).append(seconds)
    return [{"kind": kind, "count": len(times), "wall_seconds": math.fsum(times)} for kind, times in found.items()]


def crashed(job: Job, error: str) -> dict[str, Any]:
    """Return the record of a job whose process died, or that was not started because its rehearsal failed."""
    record = {"name": job.name, "arm": job.arm.name, "seed": job.seed, "status": "crashed", "error": error}
    pacer = Pacer(job.pace)
    if job.pace.sweep is not None:
        return {**record, **_rehearsal(job, pacer, None, 0.0)}
    empty = _run(job, pacer, torch.device("cpu"), None)
    return {**record, **empty, "peak_memory_bytes": 0, "notes": []}


def _set_alarm(seconds: float | None) -> Callable[[], None]:
    """Raise :class:`Late` in this thread after ``seconds``, and return a function that restores the previous alarm."""
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return lambda: None

    def ring(*_: Any) -> None:
        raise Late

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)

    def restore() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), interval)

    return restore


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
