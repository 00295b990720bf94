"""What a unit's process does: ``python -m benchmarks.gpu.process '{"unit": ..., ...}'``, which the driver starts."""

import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import files
from benchmarks.gpu.work import Broken, OutOfTime, Work, told


def run(given: dict[str, Any]) -> files.Result:
    """Run a unit to its end, or to the end of its time, and write its result.

    Args:
        given: ``unit``, ``module`` (with a function ``run(work)``), ``settings``, ``needs`` (packages), ``file``,
            ``environment``, ``limit_seconds``, and ``seconds`` that are left.

    Returns:
        What was written.
    """
    began = time.monotonic()
    file, environment, settings = Path(given["file"]), given["environment"], given["settings"]
    before = files.read(file)
    result: files.Result = {
        "format": files.FORMAT,
        **{key: given[key] for key in ("unit", "settings", "limit_seconds", "environment")},
    }
    work = Work(file, result, began + given["seconds"], before if files.counts(before, environment, settings) else None)
    missing = [name for name in given["needs"] if importlib.util.find_spec(name) is None]
    if missing:
        work.save("skipped", f"not installed: {', '.join(missing)}")
        return result
    try:
        importlib.import_module(given["module"]).run(work)
    except OutOfTime as error:
        work.save("partial", f"no time was left for {error}, and what comes after it")
    except Broken as error:
        work.save("error", str(error))
    except ModuleNotFoundError as error:
        work.save("skipped", str(error))
    except Exception as error:
        work.save("error", told(error))
    else:
        work.end()
    return result


def end_with(parent: int) -> None:
    """End this process and all that it started within a second of the driver's end."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.3)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with(os.getppid())
    run(json.loads(sys.argv[1]))
