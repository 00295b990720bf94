"""A search in a folder in which there is one already: it goes on with the same plan and the same code, and with no other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.results import now, write_json

SAME = ("cpu", "gpu", "torch", "lightning")  # of the machine
LOOKED = ("profile.json", "probes.json", "start.json")  # what was looked at


def begun(folder: Path) -> bool:
    """Whether there are trials."""
    return (folder / "trials.json").is_file()


def take_up(folder: Path, plan: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Begin in ``folder``, or go on with the same.

    Raises:
        UsageError: where there are other files, or what was found for another plan or on another machine.
    """
    file = folder / "plan.json"
    every = folder.iterdir() if folder.is_dir() else ()
    there = [one.name for one in every if one.suffix != ".tmp"]  # which a kill leaves of a file
    if there == [file.name]:
        file.unlink()  # nothing was found there: it was begun with what could not be used
    if not file.is_file():
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; expected a folder. Name another one: --out.")
        folder.mkdir(parents=True, exist_ok=True)
        if set(there) - {file.name}:
            raise UsageError(f"{folder} holds other files; expected an empty folder. Name another one: --out.")
        write_json(file, {"created": now(), "machine": machine, "plan": plan})
    before = json.loads(file.read_text())
    differs = [key for key, value in json.loads(json.dumps(plan)).items() if before["plan"].get(key) != value]
    differs += [key for key in SAME if before["machine"][key] != machine[key]]
    if differs:
        raise UsageError(
            f"{folder} holds what was found for another plan, which differs in {', '.join(differs)}; expected the same on the"
            " same machine, to go on with it. Name another folder (--out), or delete that one."
        )


def take_up_code(folder: Path, code: Mapping[str, str]) -> None:
    """Go on with the same code; where it has changed, what was looked at is looked at again.

    Args:
        folder: of the search.
        code: digests of what the source files hold, by their paths.

    Raises:
        UsageError: where there are trials of other code.
    """
    file = folder / "code.json"
    before = json.loads(file.read_text()) if file.is_file() else code
    changed = sorted(path for path in {*before, *code} if before.get(path) != code.get(path))
    if changed and begun(folder):
        raise UsageError(
            f"{folder} holds trials of other code: {', '.join(changed)} changed since they were made; expected the same, to go"
            " on with them. Name another folder (--out), or delete that one."
        )
    for name in LOOKED if changed else ():
        (folder / name).unlink(missing_ok=True)


def keep_code(folder: Path, code: Mapping[str, str]) -> None:
    """Write down what the code was when it was looked at; no earlier, so that a folder without a profile is begun anew."""
    write_json(folder / "code.json", code)
