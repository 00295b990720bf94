"""Finds the cases and measures them."""

import gc
import importlib
import importlib.metadata
import os
import pkgutil
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.peers import cases as families
from benchmarks.peers import measure
from benchmarks.peers.case import Arm, Case

SECONDS = 3.0  #: of processor time for the turns of one case
__all__ = ["found", "measured", "rows"]


def found(only: Iterable[str] = ()) -> list[tuple[str, Case]]:
    """Return the cases with their family, sorted by family.

    Args:
        only: words. A case is kept if one of them is in its name, its technique or its family, in any case. Empty keeps all.

    Raises:
        ValueError: two cases have the same name.
    """
    every: dict[str, tuple[str, Case]] = {}
    for module in sorted(pkgutil.iter_modules(families.__path__), key=lambda module: module.name):
        for case in importlib.import_module(f"{families.__name__}.{module.name}").cases():
            if case.name in every:
                raise ValueError(f"found({case.name!r}): two cases have this name. Rename one of them.")
            every[case.name] = (module.name, case)
    words = [word.lower() for word in only]
    return [
        (family, case)
        for family, case in every.values()
        if not words or any(word in text.lower() for word in words for text in (case.name, case.technique, family))
    ]


def version(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measured(case: Case, rounds: int | None = None, seconds: float = SECONDS) -> dict[str, Any]:
    """Measure one case.

    Args:
        case: which.
        rounds: instead of the case's own.
        seconds: of processor time for its turns.

    Returns:
        Its row of the results. ``missing`` says that the peer is not installed, ``error`` why the case failed.
    """
    row: dict[str, Any] = {
        "name": case.name,
        "technique": case.technique,
        "peer": case.peer,
        "package": case.package,
        "version": version(case.package),
        "unit": case.unit,
        "goal": case.goal,
        "transient_goal_mib": case.transient_goal,
    }
    if row["version"] is None:
        return row | {"missing": f"{case.package} is not installed"}
    torch.manual_seed(0)
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, peer = case.build()
            row |= measure.turns(ours, peer, rounds or case.rounds, seconds)
            row |= memory(ours, peer)
            if case.figures is not None:
                row["figures"] = case.figures()
    except Exception as error:
        traceback.print_exc()
        cause = error.__cause__ or error  # a fit's own error
        row["error"] = f"{type(cause).__name__}: {cause}".splitlines()[0]
    row["seconds"] = time.process_time() - began
    return row


def memory(ours: Arm, peer: Arm) -> dict[str, int]:
    """The bytes that each arm keeps, and those that a step needs on top."""
    counted: dict[str, int] = {}
    for name, arm in (("ours", ours), ("peer", peer)):
        counted[f"{name}_transient_bytes"] = measure.transient_bytes(arm.step)
        counted[f"{name}_state_bytes"] = measure.state_bytes(arm.state())
        counted[f"{name}_peak_bytes"] = counted[f"{name}_transient_bytes"] + counted[f"{name}_state_bytes"]
    return counted


def rows(
    chosen: list[tuple[str, Case]], rounds: int | None, seconds: float, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure all cases, and report each one as it ends."""
    for number, (family, case) in enumerate(chosen, 1):
        row = {"family": family, **measured(case, rounds, seconds), "load": os.getloadavg()[0]}
        gc.collect()
        tell(f"[{number:2} of {len(chosen)}] {case.name}: {line(row)}")
        yield row


def line(row: dict[str, Any]) -> str:
    """A row in a few words."""
    if problem := row.get("missing") or row.get("error"):
        return problem
    low, high = row["interval"]
    spans = [row[f"{name}_transient_bytes"] / 2**20 for name in ("ours", "peer")]
    return (
        f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}) of {row['peer']}, {row['ours_ms'][1]:.3f} ms a {row['unit']},"
        f" transient {spans[0]:.1f} MiB of {spans[1]:.1f}, {row['rounds']} rounds, {row['seconds']:.0f} s"
    )
