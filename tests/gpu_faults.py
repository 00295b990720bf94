"""Units that go wrong in every way, for the tests of ``benchmarks.gpu``: light, since each is a process of its own."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.work import Row, Skip, Work


class AcceleratorError(RuntimeError):
    """As torch names what CUDA reports."""


class OutOfMemoryError(RuntimeError):
    """Likewise."""


def run(work: Work) -> None:
    fault = work.settings["fault"]
    if fault == "import":
        import a_package_that_nobody_has  # noqa: F401 # pyright: ignore[reportMissingImports]
    rows = work.settings.get("rows", ["first", "second", "third"])
    if fault == "own error":
        raise ValueError("this unit is wrong")
    for key in rows:
        work.row(key, lambda key=key: make(work.settings, key), needs=work.settings.get("needs", 0.0))


def make(settings: dict[str, Any], key: str) -> Row:
    """A row; the second one goes wrong."""
    with open(settings["log"], "a") as log:
        log.write(f"{key}\n")
    if key == "second":
        FAULTS[settings["fault"]](settings)
    return {"value": len(key)}


def crash(settings: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(settings: dict[str, Any]) -> None:
    """With a child that would go on without it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(settings["log"] + ".pids", "a") as pids:
        pids.write(f"{os.getpid()} {child.pid}\n")
    time.sleep(600)


def out_of_memory(settings: dict[str, Any]) -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")


def illegal_access(settings: dict[str, Any]) -> None:
    raise AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")


def missing(settings: dict[str, Any]) -> None:
    raise ModuleNotFoundError("No module named 'torchao'")


def unfit(settings: dict[str, Any]) -> None:
    raise Skip("needs compute capability 9.0")


def nothing(settings: dict[str, Any]) -> None:
    """All is well."""


FAULTS = {
    "crash": crash,
    "hang": hang,
    "out of memory": out_of_memory,
    "illegal access": illegal_access,
    "missing": missing,
    "unfit": unfit,
    "nothing": nothing,
}
