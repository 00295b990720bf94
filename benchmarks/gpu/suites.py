"""The tests on the device: kernels compiled, what needs CUDA, and the contract with its runs on the GPU.

pytest runs in this unit's own process, on several workers where pytest-xdist is installed; each test is a row. A test that was
run before is not run again. LIGHTNING_EFF_TEST_ACCELERATOR says where the tests' trainers compute.
"""

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.work import Broken, OutOfTime, Row, Work, breaks

DONE = "BENCHMARKS_GPU_DONE"  # names the file that holds the tests which are not to be run again
WORKER = "PYTEST_XDIST_WORKER"
MOST_WORKERS = 8
_answers = True


class Recorder:
    """A pytest plugin that writes each test as a row, and ends the run before its time is out."""

    def __init__(self, work: Work, alone: bool) -> None:
        self.work, self.alone = work, alone
        self.out_of_time = False
        self.broken = ""
        self.added: set[str] = set()
        self.phases: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.phases.setdefault(report.nodeid, {"row": report.nodeid, "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if report.failed:
            row["error"] = _told(report)
        elif report.skipped and not hasattr(report, "wasxfail"):
            row["skipped"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if report.when == "teardown":
            self._add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._add(nodeid)  # where its worker died, there was no teardown
        if self.work.left() < 0:
            self.out_of_time = True
            self._end("no time is left")
        if self.broken and self.alone:
            self._end(self.broken)

    def _add(self, nodeid: str) -> None:
        row = self.phases.pop(nodeid, None)
        if row is None or nodeid in self.added:  # a worker that ended itself is told of twice
            return
        self.added.add(nodeid)
        self.work.add(row)
        if "error" in row and breaks(RuntimeError(row["error"])):
            self.broken = row["error"]

    def _end(self, why: str) -> None:
        import pytest

        pytest.exit(why, returncode=0)


def _told(report: Any) -> str:
    text = getattr(report, "longreprtext", "") or str(report.longrepr)
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (lines[0] if lines else text.strip().splitlines()[-1] if text.strip() else report.when)[:300]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """In each worker, which loads this file as a plugin: leave out what was run before."""
    file = os.environ.get(DONE)
    done = set(json.loads(Path(file).read_text())) if file else set()
    kept = [item for item in items if item.nodeid not in done]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = kept


def pytest_runtest_logreport(report: Any) -> None:
    """In a worker of pytest-xdist: a device that no longer answers it ends it, and another one goes on."""
    global _answers
    if WORKER in os.environ and report.failed and breaks(RuntimeError(_told(report))):
        _answers = False


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    if not _answers:
        os._exit(1)


def run(work: Work) -> None:
    """Settings: ``tests``, paths or node ids; ``keywords``, pytest's -k; ``accelerator``; ``workers``, else half the cores."""
    import pytest

    s = work.settings
    done = [row["row"] for row in work.result["rows"]]
    workers = s.get("workers") or min(MOST_WORKERS, (os.cpu_count() or 1) // 2)
    os.environ["LIGHTNING_EFF_TEST_ACCELERATOR"] = "cpu" if work.tiny else s["accelerator"]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop(WORKER, None)  # of a run of tests that this one is part of
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "done.json")
        file.write_text(json.dumps(done))
        os.environ[DONE] = str(file)
        given = [*s["tests"], "-q", "-rN", "-p", "benchmarks.gpu.suites", "-p", "no:cacheprovider", "-m", "not slow"]
        # other versions warn of other things: what is tried here is the device
        given += ["-W", "default", "--tb=short", f"--basetemp={folder}/tests", "-o", "timeout=60"]
        workers = workers if find_spec("xdist") is not None and not work.tiny else 1
        if s["keywords"]:
            given += ["-k", s["keywords"]]
        if find_spec("pytest_timeout") is None:
            given += ["-o", "addopts=", "--import-mode=importlib"]
        if workers > 1:
            given += ["-n", str(workers), "--dist", "load"]
        recorder = Recorder(work, workers == 1)
        code = pytest.main(given, plugins=[recorder])
    if recorder.broken and workers == 1:
        raise Broken(recorder.broken)
    if recorder.out_of_time:
        raise OutOfTime(f"{len(work.result['rows'])} tests were run; the others")
    # a worker's pytest ends with 1 where a test file cannot be imported
    if code not in (0, 1, 5) or not work.result["rows"]:
        raise RuntimeError(f"pytest ended with {code!r}: see what it printed")
