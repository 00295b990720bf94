"""The search: every layout's memory and a lower bound of its time; the best are simulated until no other can be better."""

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
    """What the search found.

    Attributes:
        profile: of the module.
        accelerator: of the table.
        assumptions: that it rests on.
        gpus: accelerators in all.
        global_batch: samples of a step.
        best: the fastest layouts, fastest first.
        timeline: of the first of them.
        families: why the others lose.
        refused: how many combinations could not be had, by reason.
        enumerated: layouts that can be had.
        out_of_memory: of them.
        simulated: of them; all others have a lower bound above the last of the best.
        smallest: bytes of the layout that needs the least.
    """

    profile: ModuleProfile
    accelerator: Accelerator
    assumptions: Assumptions
    gpus: int
    global_batch: int
    best: tuple[Candidate, ...]
    timeline: Timeline | None
    families: tuple[Family, ...]
    refused: dict[str, int]
    enumerated: int
    out_of_memory: int
    simulated: int
    smallest: float

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "gpus": self.gpus,
            "gpu": asdict(self.accelerator),
            "global_batch": self.global_batch,
            "assumptions": asdict(self.assumptions),
            "profile": self.profile.record(),
            "best": [candidate.record() for candidate in self.best],
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
        profile: of the module.
        accelerator: of the table.
        gpus: how many of them, at least 1.
        global_batch: samples of a step, at least 1.
        assumptions: the defaults if None.
        progress: is told now and then how far the search is.
        able: what the recipe allows; everything if None.
        only: values of a layout's fields that it has to have.

    Raises:
        ValueError: for numbers that are not positive.
    """
    for name, value in (("gpus", gpus), ("global_batch", global_batch)):
        if value < 1:
            raise ValueError(f"plan({name}={value}): expected at least 1.")
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
            refused["left out by --only"] += 1
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
    found: list[Candidate] = []
    first: Timeline | None = None
    fitting = len(queue)
    simulated = 0
    while queue and (len(found) < _SHOWN or queue[0][0] < found[_SHOWN - 1].seconds):
        candidate, line = evaluator.run(heapq.heappop(queue)[2])
        simulated += 1
        tally.simulated(candidate)
        found.append(candidate)
        found.sort(key=lambda c: c.seconds)
        if found[0] is candidate:
            first = line
        if simulated % 10 == 0:
            tell(f"{simulated:,} of {fitting:,} simulated, best {found[0].seconds:.4g} s a step")
    best = tuple(found[:_SHOWN])
    return Plan(
        profile,
        accelerator,
        assumptions,
        gpus,
        global_batch,
        best,
        first,
        tuple(tally.families(best, evaluator.limit, lambda layout: evaluator.run(layout)[0])),
        dict(refused.most_common()),
        tally.count,
        tally.count - fitting,
        simulated,
        tally.smallest,
    )
