"""Reasons why layouts are slower, for each group of layouts with a setting in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_eff.planner.evaluator import Candidate
from lightning_eff.planner.layouts import Layout


@dataclass(frozen=True)
class Family:
    """The layouts that share one setting.

    Attributes:
        setting: the setting, such as "tp = 4".
        count: number of possible layouts.
        fitting: number of layouts that fit into memory.
        seconds: least simulated time of a step, or None if no layout fits.
        least_bytes: memory of the smallest layout.
        reason: why the fastest of them is not the best.
    """

    setting: str
    count: int
    fitting: int
    seconds: float | None
    least_bytes: float
    reason: str


def _settings(layout: Layout) -> dict[str, str]:
    return {
        "tensor parallel": f"tp = {layout.tp}",
        "pipeline": f"pp = {layout.pp}",
        "schedule": layout.schedule if layout.pp > 1 else "no pipeline",
        "sharding": _sharding(layout),
        "remat": f"remat {layout.remat}",
        "techniques": "FP8" if layout.fp8 else "no FP8",
        "compression": f"{layout.bits} bits saved" if layout.bits < 32 else "no compression",
        "offload": "optimizer on the host" if layout.offload else "optimizer on the device",
    }


def _sharding(layout: Layout) -> str:
    if layout.shard == "none":
        return "whole copies (DDP)"
    if layout.shards:
        return "sharded in groups (HSDP)"
    return "sharded, gathered once per step" if layout.shard == "zero2" else "sharded"


@dataclass
class _Seen:
    count: int = 0
    fitting: int = 0
    least_bytes: float = float("inf")
    least_bound: float = float("inf")
    likeliest: Layout | None = None
    best: Candidate | None = None


class Tally:
    """Counts layouts by setting.

    Attributes:
        count: number of layouts.
        smallest: bytes of the layout that needs the least memory.
    """

    def __init__(self) -> None:
        self.count = 0
        self.smallest = float("inf")
        self._seen: dict[tuple[str, str], _Seen] = {}

    def add(self, layout: Layout, size: float, bound: float | None) -> None:
        """Count a layout of ``size`` bytes; ``bound`` is the lower bound of its seconds, or None if it does not fit."""
        self.count += 1
        self.smallest = min(self.smallest, size)
        for key in _settings(layout).items():
            seen = self._seen.setdefault(key, _Seen())
            seen.count += 1
            seen.least_bytes = min(seen.least_bytes, size)
            if bound is not None:
                seen.fitting += 1
                if bound < seen.least_bound:
                    seen.least_bound, seen.likeliest = bound, layout

    def simulated(self, candidate: Candidate) -> None:
        """Record the simulated time of a layout."""
        for key in _settings(candidate.layout).items():
            seen = self._seen[key]
            if seen.best is None or candidate.seconds < seen.best.seconds:
                seen.best = candidate

    def families(self, best: Sequence[Candidate], limit: float, run: Callable[[Layout], Candidate]) -> list[Family]:
        """Return one family per setting, including the best layout's settings, in groups.

        Args:
            best: the fastest layouts.
            limit: usable bytes.
            run: simulates a layout. It is called for settings without a simulated layout.
        """
        if not best:
            return []
        for seen in self._seen.values():
            if seen.best is None and seen.likeliest is not None:
                self.simulated(run(seen.likeliest))
        mine = set(_settings(best[0].layout).items())
        order = list(_settings(best[0].layout))
        rows: list[Family] = []
        for (group, setting), seen in sorted(self._seen.items(), key=lambda row: order.index(row[0][0])):
            seconds: float | None = None
            if seen.best is None:
                reason = f"out of memory: needs {seen.least_bytes / 1e9:,.4g} GB of {limit / 1e9:,.4g} GB usable"
            else:
                seconds = seen.best.seconds
                reason = "used by layout 1" if (group, setting) in mine else difference(seen.best, best[0])
            rows.append(Family(setting, seen.count, seen.fitting, seconds, seen.least_bytes, reason))
        return rows


def difference(other: Candidate, best: Candidate) -> str:
    """Name the activity that costs the slower layout the most additional time."""
    worse = {name: other.parts[name] - best.parts[name] for name in best.parts}
    name = max(worse, key=lambda n: worse[n])
    if other.seconds <= best.seconds * 1.001 or worse[name] <= 0:
        return "about as fast"
    return f"{other.seconds / best.seconds:.2f} times as long: {worse[name]:.3g} s more {name}"
