"""Delayed scaling in two processes: ranks share their scales, under DDP and FSDP2, and resume from rank 0's checkpoint."""

from pathlib import Path

from tests.processes import launch


def test_two_processes(tmp_path: Path) -> None:
    launch("tests.precision.fp8_jobs", str(tmp_path), forked=True, timeout=250)
