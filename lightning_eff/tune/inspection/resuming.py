"""Resumes a search in its folder, if its plan, its code and its machine are the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.results import now, write_json

SAME = ("cpu", "gpu", "torch", "lightning")  # what must be the same on the machine
LOOKED = ("profile.json", "probes.json", "start.json")  # results of the inspection


def begun(folder: Path) -> bool:
    """Whether the folder has trials."""
    return (folder / "trials.json").is_file()


def start_or_resume(folder: Path, plan: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Start a search in ``folder``, or resume the same search.

    Raises:
        UsageError: if the folder holds other files, or a search with another plan or from another machine.
    """
    file = folder / "plan.json"
    every = folder.iterdir() if folder.is_dir() else ()
    there = [one.name for one in every if one.suffix != ".tmp"]  # left by a killed process
    if there == [file.name]:
        file.unlink()  # an earlier search had arguments that could not be used
    if not file.is_file():
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file. Name a folder with --out.")
        folder.mkdir(parents=True, exist_ok=True)
        if set(there) - {file.name}:
            raise UsageError(f"{folder} holds other files. Name an empty folder with --out.")
        write_json(file, {"created": now(), "machine": machine, "plan": plan})
    before = json.loads(file.read_text())
    differs = [key for key, value in json.loads(json.dumps(plan)).items() if before["plan"].get(key) != value]
    differs += [key for key in SAME if before["machine"][key] != machine[key]]
    if differs:
        raise UsageError(
            f"{folder} holds another search, which differs in {', '.join(differs)}. Name another folder with --out, or delete"
            " this one."
        )


def check_code(folder: Path, code: Mapping[str, str]) -> None:
    """Check that the code is the same. If it has changed, the inspection is repeated.

    Args:
        folder: the folder of the search.
        code: digests of the source files, by path.

    Raises:
        UsageError: if the folder has trials of other code.
    """
    file = folder / "code.json"
    before = json.loads(file.read_text()) if file.is_file() else code
    changed = sorted(path for path in {*before, *code} if before.get(path) != code.get(path))
    if changed and begun(folder):
        raise UsageError(
            f"{folder} holds trials of other code: {', '.join(changed)} changed since then. Name another folder with --out, or"
            " delete this one."
        )
    for name in LOOKED if changed else ():
        (folder / name).unlink(missing_ok=True)


def save_code(folder: Path, code: Mapping[str, str]) -> None:
    """Save the digests of the inspected code. Call it after the profile, so that a folder without one starts again."""
    write_json(folder / "code.json", code)
