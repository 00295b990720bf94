"""Worker processes end with their bench, however it ends, and in the middle of a job too."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Pace
from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.places import Places
from lightning_eff.bench.running.worker import MARK
from lightning_eff.bench.running.workers import Workers, environments

ROOT = Path(__file__).parent.parent.parent
AT_ONCE = 15.0  # seconds: also on a busy machine, and far less than the job of a minute takes
CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  callbacks: [{class_path: tests.bench.tasks.Delay, init_args: {seconds: 0.2}}]
model: {class_path: tests.bench.tasks.Small, init_args: {lr: 0.1}}
data: {class_path: tests.bench.tasks.Data}
"""
BENCH = """
import sys
from pathlib import Path
from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.places import Places
from lightning_eff.bench.running.workers import Workers
import json
job = Job.of(json.loads(sys.argv[1]))
for _ in Workers(1, 1, Path(sys.argv[2])).each([job], lambda job, u: print("step", flush=True)):
    pass
"""


@pytest.fixture
def order(tmp_path: Path) -> dict:
    """A job of a minute or so."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    arm = Arm("slow", "baseline", (str(tmp_path / "config.yaml"),))
    return Job(arm, 1, Pace("val_loss", 60.0, steps=300), "slow", 1).record()


def test_runs_at_once_have_a_device_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of three, four runs at once have one each in turn; one after the other they have what this process has."""
    seen: list[tuple[str, str | None]] = []
    here = threading.Barrier(4)

    class Process:
        alive = True

        def __init__(self, log: Path, threads: int, environment: dict[str, str]) -> None:
            self.device = environment.get("CUDA_VISIBLE_DEVICES")

        def do(self, jobs: list[str], progress: object) -> list[dict[str, str]]:
            if all(job.startswith("run") for job in jobs):
                here.wait(20)
            seen.extend((job, self.device) for job in jobs)
            return [{"name": job} for job in jobs]

        def end(self) -> None:
            pass

        kill = end

    monkeypatch.setattr("lightning_eff.bench.running.workers._Worker", Process)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    workers = Workers(4, 1, tmp_path)
    list(workers.together(["rehearsal"], lambda job, u: None))  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        list(workers.each([f"run{i}" for i in range(4)], lambda job, u: None))  # pyright: ignore[reportArgumentType]
    assert seen[0] == ("rehearsal", None)
    assert sorted(str(device) for _, device in seen[1:5]) == sorted(str(d) for _, d in seen[5:]) == ["2", "2", "5", "7"]
    seen.clear()
    one = Workers(1, 1, tmp_path)
    list(one.each(["alone"], lambda job, u: None))  # pyright: ignore[reportArgumentType]
    assert seen == [("alone", None)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environments(2) == [{}, {}], "all have the only one"


@pytest.mark.parametrize("kind", ["each", "places"])
def test_a_job_that_takes_too_long_is_ended_and_the_next_is_done(kind: str, order: dict, tmp_path: Path) -> None:
    """It counts as a crash of that job alone, and the next job has a new process."""
    slow = replace(Job.of({**order, "pace": asdict(Pace("val_loss", 1e6, steps=300))}), limit=8.0)
    quick = replace(Job.of({**order, "pace": asdict(Pace("val_loss", steps=300, sweep=2))}), name="quick", limit=600.0)
    places = Places(1, 1, tmp_path / "logs") if kind == "places" else Workers(1, 1, tmp_path / "logs")
    try:
        if isinstance(places, Places):
            late, done = *places.do([slow]), *places.do([quick])
        else:
            (late,), (done,) = (
                [record for _, record in getattr(places, kind)([job], lambda job, u: None)] for job in (slow, quick)
            )
    finally:
        places.close()
    assert late["status"] == "crashed" and late["error"].startswith("it was killed after 8 s, which is too long")
    assert done["status"] == "finished" and done["error"] is None


def gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_killed_bench_takes_its_worker_along(order: dict, tmp_path: Path) -> None:
    """Only the bench is killed, not its group."""
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH, json.dumps(order), str(tmp_path / "logs")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bench.stdout is not None
    try:
        assert bench.stdout.readline() == "step\n"
        listed = Path(f"/proc/{bench.pid}/task").glob("*/children")
        workers = [int(pid) for children in listed for pid in children.read_text().split()]
    finally:
        os.kill(bench.pid, signal.SIGKILL)
    assert len(workers) == 1 and gone(workers[0], AT_ONCE)
    bench.wait()
    bench.stdout.close()


def test_a_worker_whose_orders_end_in_the_middle_of_a_job_ends_at_once(order: dict, tmp_path: Path) -> None:
    """As they do where the system does not tell a process that its parent died; between jobs it ends by itself."""
    for job in (order, None):
        worker = subprocess.Popen(
            [
                *(sys.executable, "-c", "from lightning_eff.bench.running.worker import main; main()"),
                *(str(tmp_path / "log"), str(os.getpid())),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None and worker.stdout is not None
        if job is not None:
            worker.stdin.write(json.dumps([job]) + "\n")
            worker.stdin.flush()
            assert worker.stdout.readline().startswith(MARK)
        worker.stdin.close()
        assert worker.wait(timeout=AT_ONCE if job is not None else 60.0) == (1 if job is not None else 0)
        worker.stdout.close()
