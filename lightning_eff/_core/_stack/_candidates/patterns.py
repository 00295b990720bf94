"""Patterns of submodule paths: ``*`` matches anything within one name, as in ``block_*`` and ``model.layers.*``."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from lightning_eff._core._stack._candidates.candidate import in_order

_RUN = re.compile(r".*\[\d+:\d+\]")


def is_run(layers: str) -> bool:
    """Return whether ``layers`` names a run of blocks (``net[1:5]``)."""
    return _RUN.fullmatch(layers) is not None


def is_pattern(layers: str) -> bool:
    """Return whether ``layers`` is a pattern, rather than a path or a run of blocks."""
    return any(sign in layers for sign in "*?[") and not is_run(layers)


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return those of ``paths`` that match ``pattern``, sorted by the numbers in them, otherwise in order of registration."""
    parts = pattern.split(".")
    found = []
    for path in paths:
        names = path.split(".")
        if len(names) == len(parts) and all(map(fnmatchcase, names, parts)):
            found.append(path)
    return in_order(found)
