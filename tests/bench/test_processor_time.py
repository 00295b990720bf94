"""Rehearsals in processor time do not count what a step waits for."""

import time
from pathlib import Path

import pytest

from benchmarks.processor_time import ByProcessor
from lightning_eff.bench import pacer
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Pace
from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.workers import Workers

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  callbacks: [{class_path: tests.bench.tasks.Delay, init_args: {seconds: 0.2}}]
model: {class_path: tests.bench.tasks.Small, init_args: {lr: 0.1}}
data: {class_path: tests.bench.tasks.Data}
"""


@pytest.mark.parametrize(("kind", "waits"), [(Workers, True), (ByProcessor, False)])
def test_waiting_counts_on_the_wall_alone(kind: type[Workers], waits: bool, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    arms = [Arm(name, "recipe", (str(tmp_path / "config.yaml"),)) for name in ("one", "two")]
    jobs = [Job(arm, 1, Pace("val_loss", 60.0, steps=6, sweep=6), arm.name, 1) for arm in arms]
    workers = kind(1, 1, tmp_path / "logs")
    try:
        done = list(workers.together(jobs, lambda job, u: None))
    finally:
        workers.close()
    assert pacer.time is time
    assert [job.name for job, _ in done] == ["one", "two"]
    for _, record in done:
        assert record["status"] == "finished", record["error"]
        assert all((seconds >= 0.2) == waits for seconds in record["times"][1:])
