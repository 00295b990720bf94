"""Results on disk: one JSON file for each unit, written whole or not at all, and bundles of them."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

FORMAT = 1
SAME = ("device", "gpu_memory_bytes", "torch", "triton", "tiny")
"""What two results must agree in, beside their settings, for one to count for the other."""
Result = dict[str, Any]


def file_of(folder: Path, name: str) -> Path:
    """Where the unit ``name`` has its result: ``memory eager`` in ``gpu_memory_eager.json``."""
    return folder / f"gpu_{name.replace(' ', '_')}.json"


def write(file: Path, result: Any) -> None:
    """Write JSON so that a reader, or a process killed in between, finds the old content or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(result, stream, ensure_ascii=False, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def read(file: Path) -> Result | None:
    """A unit's result, or None where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def counts(result: Result | None, environment: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a result was got on such a device, with such versions and settings."""
    if result is None:
        return False
    before = result.get("environment") or {}
    return result.get("settings") == settings and all(before.get(key) == environment.get(key) for key in SAME)


def bundle(folder: Path, file: Path) -> None:
    """All results of a folder in one file, for a place that gives few files back."""
    results = [found for path in sorted(folder.glob("gpu_*.json")) if (found := read(path)) is not None]
    write(file, {"format": FORMAT, "bundle": results})


def unpack(file: Path, folder: Path) -> list[str]:
    """Write the results of a bundle into a folder, where the folder has no finished one of that unit.

    Returns:
        The units that were written.

    Raises:
        ValueError: ``file`` is no bundle.
    """
    found = read(file)
    if found is None or "bundle" not in found:
        raise ValueError(f"--take {file}: no bundle of results; expected a file that --bundle wrote.")
    written = []
    for result in found["bundle"]:
        target = file_of(folder, result["unit"])
        before = read(target)
        if before is None or before["status"] != "ok":
            write(target, result)
            written.append(result["unit"])
    return written
