"""Store a baseline's step costs by task and machine, so that a reference second stays the same."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.results import load, now, write_json
from lightning_eff.monitor.machine import SAME_MACHINE

SCHEMA = "lightning_eff.bench.prices/1"

Price = dict[str, Any]


class References:
    """Step costs in a file. A bench reads them, or writes its own if the file has none for this baseline and machine.

    The file has the baseline's step costs. Those of other arms follow from the speed ratio that each bench measures. The
    path can also be the results of another bench, on any machine. These are only read, and their step costs of all arms count.

    Args:
        path: a file that may not exist yet, or the folder or file of a bench's results.

    Raises:
        ValueError: for any other file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._results: dict[str, Any] | None = None
        if self.path.is_dir():
            self._results = load(self.path)
        elif self.path.is_file():
            kept = _read(self.path)
            self._results = load(self.path) if kept is None else None
        elif self.path.suffix != ".json":
            raise ValueError(
                f"Benchmark(reference={str(path)!r}): there is no such file or folder. Name the folder of a bench, or a .json"
                " file for step costs, which the bench creates."
            )

    def apply(self, arm: Arm, machine: Mapping[str, Any], prices: Mapping[str, list[Price]]) -> dict[str, list[Price]]:
        """Return every arm's step costs in units of the reference.

        Args:
            arm: the baseline.
            machine: the machine's fingerprint.
            prices: the step costs that this bench measured, by arm, the baseline's first.
        """
        if self._results is not None:
            theirs = self._results["calibration"]
            return {name: _theirs(name, own, theirs.get(name, {}).get("prices", [])) for name, own in prices.items()}
        own = prices[arm.name]
        kept = self.known(arm, machine, own)
        if kept is None:
            self._keep(arm, machine, own)
            return dict(prices)
        scale = mean_cost(kept) / mean_cost(own)
        scaled = {n: [{**p, "seconds": p["seconds"] * scale} for p in costs] for n, costs in prices.items()}
        return {**scaled, arm.name: kept}

    def known(self, arm: Arm, machine: Mapping[str, Any], prices: Sequence[Price]) -> list[Price] | None:
        """Return the baseline's step costs by the reference, or None without any. ``prices`` are those that were measured."""
        if self._results is not None:
            return _theirs(arm.name, prices, self._results["calibration"].get(arm.name, {}).get("prices", []))
        entry = self._entry(arm, machine)
        return None if entry is None else _theirs(arm.name, prices, entry["prices"])

    def _entry(self, arm: Arm, machine: Mapping[str, Any]) -> dict[str, Any] | None:
        entries = (_read(self.path) or {"entries": []})["entries"]
        key = _key(arm, machine)
        return next((e for e in entries if {name: e[name] for name in key} == key), None)

    def _keep(self, arm: Arm, machine: Mapping[str, Any], prices: list[Price]) -> None:
        kept = _read(self.path) or {"schema": SCHEMA, "entries": []}
        entry = {**_key(arm, machine), "name": arm.name, "created": now()}
        kept["entries"].append({**entry, "torch": machine["torch"], "prices": prices})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, kept)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of step costs, or None if the file does not exist or contains something else."""
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"Benchmark(reference={str(path)!r}): the file is not JSON ({error}). Name another file."
        ) from None
    return kept if isinstance(kept, dict) and kept.get("schema") == SCHEMA else None


def _key(arm: Arm, machine: Mapping[str, Any]) -> dict[str, Any]:
    return {"task": task(arm), "machine": {name: machine[name] for name in SAME_MACHINE}}


def task(arm: Arm) -> str:
    """Return a hash that identifies a baseline: of its configs' texts, or of its function's source and closure."""
    parts = _identity(arm.source) if callable(arm.source) else [Path(path).read_text() for path in arm.source]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _identity(function: Callable[..., Any]) -> list[str]:
    """Return the sources and values of a function and its closure, recursively."""
    parts: list[str] = []
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop(0)
        if not callable(value):
            parts.append(
                repr(value) if isinstance(value, int | float | str | tuple | None) else type(value).__qualname__
            )
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.isfunction(value):
            try:
                parts.append(inspect.getsource(value))
            except OSError:
                parts.append(value.__qualname__)
            waiting += [cell.cell_contents for cell in value.__closure__ or ()]
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        else:
            parts.append(f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}")
            waiting += [
                getattr(value, "func", None),
                *getattr(value, "args", ()),
                *getattr(value, "keywords", {}).values(),
            ]
    return parts


def _theirs(name: str, prices: Sequence[Price], kept: Sequence[Price]) -> list[Price]:
    """Return the stored step costs, and for other kinds the measured ones, scaled by the ratio of the common kinds."""
    theirs = {price["kind"]: price["seconds"] for price in kept}
    ratios = [theirs[price["kind"]] / price["seconds"] for price in prices if price["kind"] in theirs]
    if not ratios:
        raise Incomparable(
            f"{name}: the reference has no step cost for any of its kinds of steps ({[p['kind'] for p in prices][:5]}). Name a"
            " bench of the same arms, or leave --reference out to measure step costs here."
        )
    scale = median(ratios)
    return [{**price, "seconds": theirs.get(price["kind"], price["seconds"] * scale)} for price in prices]


def mean_cost(prices: Sequence[Price]) -> float:
    """Return the mean seconds per batch."""
    return sum(price["seconds"] * price["share"] for price in prices)
