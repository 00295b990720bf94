"""Begins units that can end in time, each in a process of its own, ends those that hang, and tells what there is."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import files

ROOT = Path(__file__).parent.parent.parent
LIMIT = 90.0  #: seconds that a unit may take at most
MARGIN = 6.0  #: seconds before its limit at which a unit begins no more rows
GRACE = 2.0  #: seconds that killing and writing may take


@dataclass(frozen=True)
class Unit:
    """A part of the work.

    Args:
        name: letters, digits and spaces.
        module: has ``run(work)``.
        settings: that it is given; a result with others does not count.
        needs: packages without which it is skipped.
        seconds: that it may take, at most 90.
    """

    name: str
    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    seconds: float = LIMIT

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= LIMIT:
            raise ValueError(
                f"Unit({self.name!r}, seconds={self.seconds}): expected more than 0 and at most {LIMIT:g}."
            )


def probe(*, tiny: bool, seconds: float = 90.0) -> dict[str, Any]:
    """The environment, asked for in a process of its own.

    Raises:
        RuntimeError: it could not be had, and what was said.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.environment", *(["--tiny"] if tiny else [])]
    try:
        done = subprocess.run(command, cwd=ROOT, env=_variables(tiny), capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"torch did not answer in {seconds:g} s: is the device all right?") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"torch or lightning_eff cannot be imported: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _variables(tiny: bool) -> dict[str, str]:
    """Of the environment: the tree on the path; no GPU in sight with ``tiny``, which computes on a CPU everywhere."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if tiny else {}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **hidden,
    }


def order(units: Sequence[Unit], statuses: dict[str, str]) -> list[Unit]:
    """Which units are left, in the order to try them: what was never run to an end, then what was begun, then what failed."""
    ranks = {"new": 0, "running": 0, "partial": 1, "timeout": 2, "error": 2, "skipped": 3, "failed": 4}
    left = [unit for unit in units if statuses[unit.name] != "ok"]
    return sorted(left, key=lambda unit: ranks[statuses[unit.name]])


def status_of(unit: Unit, folders: Sequence[Path], environment: dict[str, Any]) -> str:
    """The status of its result, "new" where none counts here; a result in the first folder goes before the others'."""
    for folder in folders:
        result = files.read(files.file_of(folder, unit.name))
        if result is not None and files.counts(result, environment, unit.settings):
            return result["status"]
    return "new"


def run_unit(unit: Unit, folder: Path, environment: dict[str, Any]) -> files.Result:
    """Run a unit within its time, and all that it started, to the end.

    Returns:
        Its result, as written: with status "timeout" where it was stopped, and "error" where its process died.
    """
    file = files.file_of(folder, unit.name)
    given = {
        "unit": unit.name,
        "module": unit.module,
        "settings": unit.settings,
        "needs": unit.needs,
        "file": str(file.resolve()),
        "environment": environment,
        "limit_seconds": unit.seconds,
        "seconds": max(unit.seconds - MARGIN, 0.8 * unit.seconds),
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.process", json.dumps(given)]
    log = file.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    stopped = False
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_variables(environment["tiny"]),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(unit.seconds)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind too
            process.wait()
    result = files.read(file)
    if result is None or not files.counts(result, environment, unit.settings):
        result = {"format": files.FORMAT, "unit": unit.name, "settings": unit.settings, "limit_seconds": unit.seconds}
        result |= {"environment": environment, "status": "running", "rows": []}
    if result["status"] == "running":
        why = f"stopped after {unit.seconds:g} s" if stopped else f"the process ended with {_code(process.returncode)}"
        said = [] if stopped else [text for text in log.read_text(errors="replace").splitlines() if text.strip()][-1:]
        result["status"], result["error"] = "timeout" if stopped else "error", ": ".join([why, *said])[:400]
        if current := result.pop("current", None):
            result["rows"].append({"row": current, "error": f"while it ran, {why}"})
        result["seconds"] = round(time.monotonic() - began, 2)
        files.write(file, result)
    if result["status"] in ("ok", "skipped", "partial"):
        log.unlink()
    return result


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def run_all(
    units: Sequence[Unit],
    folder: Path,
    environment: dict[str, Any],
    *,
    seconds: float,
    also: Sequence[Path] = (),
    again: bool = False,
    after: Callable[[files.Result, list[Unit]], None] = lambda result, left: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Unit]:
    """Run what is not finished, as far as the time goes.

    Args:
        units: in the order of their worth.
        folder: for results; those that are there count.
        environment: of now.
        seconds: for all; a unit is begun only where its whole limit is left, and a shorter one behind it may be.
        also: other folders whose finished results count.
        again: run finished ones too.
        after: called after each unit with its result and what is left.
        clock: seconds.

    Returns:
        The units that there was no time for.
    """
    ends = clock() + seconds
    statuses = {unit.name: status_of(unit, [folder, *also], environment) for unit in units}
    if again:
        statuses = dict.fromkeys(statuses, "new")
        for unit in units:
            files.file_of(folder, unit.name).unlink(missing_ok=True)
    left = order(units, statuses)
    for unit in list(left):
        if ends - clock() < unit.seconds + GRACE:
            continue
        left.remove(unit)
        after(run_unit(unit, folder, environment), left)
    return left
