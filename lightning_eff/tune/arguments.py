"""Amounts and files as the arguments of a search have them."""

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
    """``"40GB"``, ``"512MiB"`` or bytes.

    Raises:
        UsageError: for anything else.
    """
    if text is None or isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"Got memory {text!r}; expected an amount above 0 such as 40GB, 512MB or 16GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def too_much(peak: int, memory: int | None) -> str | None:
    """Why a run with this peak used more memory than it may; None where it did not, or where that is left open."""
    if memory is None or peak <= memory:
        return None
    return f"it used {peak / 2**30:.3g} GiB, of {memory / 2**30:.3g} GiB that it may use"


def parse_seconds(search: str | float) -> float:
    """``"2h"``, ``"30m"``, ``"600s"`` or seconds.

    Raises:
        UsageError: for anything else.
    """
    try:
        return Budget.parse(search).seconds
    except ValueError:
        raise UsageError(f"Got search {search!r}; expected a time above 0: 2h, 30m or 600s.") from None


def several(told: Any) -> tuple[Any, ...]:
    """Names or paths: those of a sequence, or one by itself."""
    return tuple(told) if isinstance(told, Iterable) and not isinstance(told, str) else (told,)


def read_space(space: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """What a space file, or a mapping in its place, says.

    Raises:
        UsageError: for a file that is not there or is no YAML.
    """
    if space is None or isinstance(space, Mapping):
        return dict(space or {})
    file = Path(space)
    if not file.is_file():
        raise UsageError(f"--space {space}: there is no such file; expected a space in YAML.")
    try:
        told = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"--space {space}: this is no YAML: {' '.join(str(error).split())}.") from None
    if told is not None and not isinstance(told, dict):
        raise UsageError(
            f"--space {space}: got a {type(told).__name__}; expected the sections own, techniques and most."
        )
    return told or {}


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
