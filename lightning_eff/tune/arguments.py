"""Reads the arguments of a search: amounts, files and the machine's cores."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.pace import Budget

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

MOST = 4  # parallel runs on a CPU by default: with more, a search learns less from each trial
ROOM = 0.7  # of this machine's memory, which all parallel runs together may use by default


def parse_memory(text: str | int | None) -> int | None:
    """Return the bytes of ``"40GB"``, ``"512MiB"`` or a number.

    Raises:
        UsageError: for anything else.
    """
    if text is None or isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"Got memory {text!r}; expected an amount above 0, such as 40GB, 512MB or 16GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def too_much(peak: int, memory: int | None) -> str | None:
    """Return why a run with this peak used too much memory. None if it did not, or without a limit."""
    if memory is None or peak <= memory:
        return None
    return f"it used {peak / 2**30:.3g} GiB, more than the limit of {memory / 2**30:.3g} GiB"


def parse_seconds(search: str | float) -> float:
    """Return the seconds of ``"2h"``, ``"30m"``, ``"600s"`` or a number.

    Raises:
        UsageError: for anything else.
    """
    try:
        return Budget.parse(search).seconds
    except ValueError:
        raise UsageError(f"Got search {search!r}; expected a time above 0: 2h, 30m or 600s.") from None


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the names or paths of a sequence, or a single one, as a tuple."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def read_space(space: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of a space file, or a copy of a mapping.

    Raises:
        UsageError: for a missing file, or a file that is not YAML.
    """
    if space is None or isinstance(space, Mapping):
        return dict(space or {})
    file = Path(space)
    if not file.is_file():
        raise UsageError(f"--space {space}: there is no such file. Give a YAML file.")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"--space {space}: this file is not YAML: {' '.join(str(error).split())}.") from None
    if content is not None and not isinstance(content, dict):
        raise UsageError(
            f"--space {space}: got a {type(content).__name__}; expected the sections own, techniques and most."
        )
    return content or {}


def at_once(threads: int) -> int:
    """Return how many runs of so many torch threads fit on this machine's cores. 0 threads means any number."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads) if threads else min(cores, MOST)


def in_memory(peak: int) -> int:
    """Return how many runs with this peak of memory fit on this machine."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return MOST
    return max(1, int(ROOM * memory / max(peak, 1)))
