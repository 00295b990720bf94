"""``python -m tests.published``: install packages, run the check, write its outcomes and the page.

``install``: install all packages into this environment, each as its file says, and say which failed.
``run [PACKAGE ...]``: run the check on the packages, all by default, and write the outcomes.
``again PACKAGE TECHNIQUE ...``: run some techniques on one package, and write their outcomes beside the others.
``try PACKAGE TECHNIQUE ...``: run some techniques on one package and print what came of them.
``page``: write docs/works_with.md from the outcomes.
"""

import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.published import installing, outcomes, page

ROOT = Path(__file__).parent.parent.parent


def _run_in_a_process(name: str, techniques: list[str]) -> dict[str, Any]:
    """One package's outcomes, found in a fork of this process: packages change global settings, and some of them crash."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.json"
        child = multiprocessing.get_context("fork").Process(target=_one, args=(name, out, techniques))
        child.start()
        child.join()
        return json.loads(out.read_text()) if out.exists() else {"failed": f"the process ended with {child.exitcode}"}


def _one(name: str, out: Path, techniques: list[str]) -> None:
    from tests.published import engine
    from tests.published.techniques import TRIED

    package = outcomes.package(name)
    try:
        found: dict[str, Any] = {
            "techniques": {
                key: asdict(value) for key, value in engine.check(package, techniques or list(TRIED)).items()
            },
            "own_fit": {} if techniques else {key: asdict(value) for key, value in engine.own_fit(package).items()},
        }
    except Exception as error:
        found = {"failed": engine.told(error)}
        print(name, found["failed"])
    out.write_text(json.dumps(found))


def _versions() -> dict[str, str]:
    names = ("torch", "lightning", "pytorch-lightning", "numpy", "transformers")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def run(names: list[str], techniques: list[str]) -> None:
    """Run the check on these packages and write what came of it; others stay as they are committed.

    With ``techniques``, these alone are tried, and other techniques' outcomes stay, too.
    """
    importlib.import_module("tests.published.engine")  # once, before the processes fork
    for name in names or outcomes.names():
        package = outcomes.package(name)
        row: dict[str, Any] = {
            "model": package.model,
            "trainer": package.trainer,
            "install": installing.command(package),
        }
        if missing := installing.missing(package):
            print(f"{package.distribution}: NOT INSTALLED, skipped. {missing}")
            row["not_installed"] = missing
        else:
            row["version"] = importlib.metadata.version(package.distribution)
            row |= _run_in_a_process(name, techniques)
        table = outcomes.committed()  # another process may have written meanwhile
        if techniques and "techniques" in row:
            before = table["packages"][package.distribution]
            row |= {"techniques": {**before["techniques"], **row["techniques"]}, "own_fit": before["own_fit"]}
        table["packages"][package.distribution] = row
        table["versions"] = _versions()
        table["date"] = datetime.now(UTC).date().isoformat()
        table["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, no accelerator"
        outcomes.write(table)


def main(args: list[str]) -> None:
    match args:
        case ["install", *names]:
            installing.install([outcomes.package(name) for name in names or outcomes.names()])
        case ["run", *names]:
            run(names, [])
        case ["again", name, *techniques]:
            run([name], techniques)
        case ["one", name, out, *techniques]:
            _one(name, Path(out), techniques)
        case ["try", name, *techniques]:
            _one(name, Path(tempfile.mkdtemp()) / "outcomes.json", techniques)
        case ["page"]:
            page.FILE.write_text(page.text(outcomes.committed()))
            print(f"written: {page.FILE}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
