"""A rank that is killed or raises stops the others, with its number, and the run goes on from its checkpoint; launchers."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import free_port
from tests.strategies.hybrid_jobs import run_case
from tests.strategies.launch import launch, start

JOBS = "tests.strategies.hybrid_jobs"
CASE: dict[str, Any] = {"model": "gpt2", "steps": 6}


def end_others_as_torchrun(processes: list["subprocess.Popen[bytes]"], logs: list[Path]) -> None:
    """As soon as rank 1 has ended, ask the other to end, too."""
    processes[1].wait(timeout=300)
    processes[0].terminate()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("kill", "died without a message"),
        pytest.param("raise", "ArithmeticError: on purpose", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_stops_the_others_with_its_number(how: str, what: str, tmp_path: Path) -> None:
    codes, logs, _ = start(
        JOBS, "end_early", str(tmp_path), how, world_size=2, timeout=300, meanwhile=end_others_as_torchrun
    )
    seconds = time.time() - float((tmp_path / "ended").read_text())
    assert seconds < 30, f"{seconds} s from the end of rank 1 to that of rank 0"
    assert codes == [1, -9 if how == "kill" else 1]
    assert "HybridParallelStrategy: rank 1 " in logs[0]
    assert what in logs[0]
    assert "resume from the last checkpoint" in logs[0]
    if how == "kill":
        whole = run_case({**CASE, "strategy": "auto", "devices": 1}, str(tmp_path))
        resumed = {**CASE, "strategy": {}, "devices": 2, "resume": "saved.ckpt"}
        found = launch(JOBS, "run_cases", str(tmp_path), {"resumed": resumed}, world_size=2)
        assert found["resumed"] == pytest.approx(whole[3:], abs=1e-5)


SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODELIST": "127.0.0.1",
    "SLURM_NODEID": "0",
}


def test_sigterm_to_one_rank_stops_all_with_its_number(tmp_path: Path) -> None:
    codes, logs, _ = start(JOBS, "end_by_signal", str(tmp_path), "term", {}, world_size=2, timeout=300)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert codes[0] == 1
    assert [rank["by"] for rank in ranks] == ["RuntimeError", "SIGTERMException"]
    for log in logs:
        assert re.search(r"rank 1 \(process \d+ on .*\) received SIGTERM, so all ranks stop", log), log
    assert 5 <= ranks[0]["steps"] == ranks[1]["steps"] < 2000, "of those it would train"
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=True)
    assert saved["global_step"] == ranks[0]["steps"]


def test_sigterm_to_all_ranks_stops_them_as_lightning_does_under_slurm(tmp_path: Path) -> None:
    codes, logs, _ = start(JOBS, "end_by_signal", str(tmp_path), "term all", SLURM, world_size=2, timeout=300)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert codes == [0, 0], logs
    assert [rank["by"] for rank in ranks] == ["SIGTERMException"] * 2
    assert ranks[0]["steps"] == ranks[1]["steps"] == 5
    assert all("received SIGTERM, so all ranks stop" in log for log in logs)


def environment(**extra: str) -> dict[str, str]:
    """Without what another launcher left."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def check_started(processes: list["subprocess.Popen[str]"], name: str, tmp_path: Path) -> None:
    for process in processes:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["environment"] for rank in ranks] == [name, name]
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert len(ranks[0]["losses"]) == 4


def begin(tmp_path: Path, env: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", JOBS, str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_lightning_starts_the_other_processes(tmp_path: Path) -> None:
    check_started([begin(tmp_path, environment())], "LightningEnvironment", tmp_path)


@pytest.mark.slow  # a second start, of seconds
def test_slurm_starts_the_processes(tmp_path: Path) -> None:
    shared = {
        **SLURM,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    each = [environment(**shared, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in range(2)]
    check_started([begin(tmp_path, env) for env in each], "SLURMEnvironment", tmp_path)
