"""The search for the fastest layouts: it bounds the time of each layout, and simulates until no other can be faster."""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_eff.planner._launch.abilities import Abilities
from lightning_eff.planner._launch.assumptions import Assumptions
from lightning_eff.planner.accelerators import Accelerator
from lightning_eff.planner.evaluator import Candidate, Evaluator
from lightning_eff.planner.families import Family, Tally
from lightning_eff.planner.layouts import Layout, enumerate_layouts
from lightning_eff.planner.profiling import ModuleProfile
from lightning_eff.planner.simulation import Timeline

_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    Attributes:
        profile: the module's profile.
        accelerator: the table's entry.
        assumptions: the numbers of the model.
        gpus: total number of accelerators.
        global_batch: samples per step.
        best: the fastest layouts, fastest first. Of layouts that tie, it has the one that needs the least memory.
        ties: for each of ``best``, the other layouts with the same time.
        timeline: the simulated step of the first of ``best``.
        families: reasons why other layouts are slower.
        refused: number of impossible combinations by reason.
        enumerated: number of possible layouts.
        out_of_memory: number of layouts that do not fit.
        simulated: number of layouts that were simulated. The rest cannot be faster than the last of ``best``.
        smallest: bytes of the layout that needs the least memory.
    """

    profile: ModuleProfile
    accelerator: Accelerator
    assumptions: Assumptions
    gpus: int
    global_batch: int
    best: tuple[Candidate, ...]
    ties: tuple[tuple[Layout, ...], ...]
    timeline: Timeline | None
    families: tuple[Family, ...]
    refused: dict[str, int]
    enumerated: int
    out_of_memory: int
    simulated: int
    smallest: float

    def record(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "gpus": self.gpus,
            "gpu": asdict(self.accelerator),
            "global_batch": self.global_batch,
            "assumptions": asdict(self.assumptions),
            "profile": self.profile.record(),
            "best": [
                {**candidate.record(), "ties": [asdict(layout) for layout in ties]}
                for candidate, ties in zip(self.best, self.ties, strict=True)
            ],
            "families": [asdict(family) for family in self.families],
            "refused": self.refused,
            "enumerated": self.enumerated,
            "out_of_memory": self.out_of_memory,
            "simulated": self.simulated,
            "smallest_memory_bytes": self.smallest,
        }


def search(
    profile: ModuleProfile,
    accelerator: Accelerator,
    gpus: int,
    global_batch: int,
    assumptions: Assumptions | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    able: Abilities | None = None,
    only: Mapping[str, Any] | None = None,
) -> Plan:
    """Find the fastest layouts.

    Args:
        profile: the module's profile.
        accelerator: an entry of the table.
        gpus: number of accelerators, at least 1.
        global_batch: samples per step, at least 1.
        assumptions: the numbers of the model; None takes the defaults.
        progress: called from time to time with a progress message.
        able: options that the recipe excludes; None excludes nothing.
        only: required values of a layout's fields.

    Raises:
        ValueError: if ``gpus`` or ``global_batch`` is not positive.
    """
    for name, value in (("gpus", gpus), ("global_batch", global_batch)):
        if value < 1:
            raise ValueError(f"plan({name}={value}): expected at least 1. Pass a positive number.")
    assumptions = assumptions or Assumptions()
    evaluator = Evaluator(profile, accelerator, assumptions)
    refused: Counter[str] = Counter()
    tally = Tally()
    queue: list[tuple[float, int, Layout]] = []
    tell = progress or (lambda text: None)
    has_fp8 = accelerator.fp8_matmul_flops is not None
    every = enumerate_layouts(profile, gpus, accelerator.node_size, global_batch, refused, able, fp8=has_fp8)
    for layout in every:
        if any(getattr(layout, name) != value for name, value in (only or {}).items()):
            refused["excluded by --only"] += 1
            continue
        size = evaluator.memory.of(layout).total
        fits = size <= evaluator.limit
        bound = evaluator.bound(layout) if fits else None
        tally.add(layout, size, bound)
        if bound is not None:
            queue.append((bound, len(queue), layout))
        if tally.count % 500 == 0:
            tell(f"{tally.count:,} layouts, {len(queue):,} fit")
    heapq.heapify(queue)
    tied: dict[float, list[Candidate]] = {}
    fitting = len(queue)
    simulated = 0
    while queue and (len(tied) < _SHOWN or queue[0][0] < sorted(tied)[_SHOWN - 1]):
        candidate, _ = evaluator.run(heapq.heappop(queue)[2])
        simulated += 1
        tally.simulated(candidate)
        tied.setdefault(float(f"{candidate.seconds:.4g}"), []).append(candidate)
        if simulated % 10 == 0:
            tell(f"{simulated:,} of {fitting:,} simulated, best {min(tied):.4g} s per step")
    groups = [sorted(tied[seconds], key=lambda c: c.memory.total) for seconds in sorted(tied)[:_SHOWN]]
    best = tuple(group[0] for group in groups)
    return Plan(
        profile,
        accelerator,
        assumptions,
        gpus,
        global_batch,
        best,
        tuple(tuple(c.layout for c in group[1:]) for group in groups),
        evaluator.run(best[0].layout)[1] if best else None,
        tuple(tally.families(best, evaluator.limit, lambda layout: evaluator.run(layout)[0])),
        dict(refused.most_common()),
        tally.count,
        tally.count - fitting,
        simulated,
        tally.smallest,
    )
