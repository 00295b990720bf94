"""Evaluation of a layout: its memory, a lower bound of its time, and its simulated time."""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_eff.planner._launch.assumptions import Assumptions
from lightning_eff.planner.accelerators import Accelerator
from lightning_eff.planner.costs import Costs, work_key
from lightning_eff.planner.layouts import Layout
from lightning_eff.planner.memory import Memory, MemoryModel
from lightning_eff.planner.profiling import ModuleProfile
from lightning_eff.planner.schedules import SCHEDULES
from lightning_eff.planner.simulation import Timeline, simulate_long


@dataclass(frozen=True)
class Candidate:
    """A simulated layout.

    Attributes:
        layout: the layout.
        memory: memory of the rank that needs the most.
        ranks: memory of each rank of the pipeline.
        seconds: time of a step.
        parts: the step's seconds by activity, on the rank that computes the longest.
        mfu: model FLOPs without recomputation, as a fraction of the accelerators' BF16 peak.
        bubble: fraction of the pipeline's time in which ranks wait.
    """

    layout: Layout
    memory: Memory
    ranks: tuple[Memory, ...]
    seconds: float
    parts: dict[str, float]
    mfu: float
    bubble: float

    def record(self) -> dict[str, Any]:
        """Return the candidate as plain values for JSON."""
        return {
            **asdict(self.layout),
            "step_seconds": self.seconds,
            "parts_seconds": self.parts,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
            "memory_bytes_by_pipeline_rank": [{**asdict(rank), "total": rank.total} for rank in self.ranks],
        }


class Evaluator:
    """Computes the time and memory of single layouts.

    Args:
        profile: the module's profile.
        accelerator: an entry of the table.
        assumptions: the numbers of the model.
    """

    def __init__(self, profile: ModuleProfile, accelerator: Accelerator, assumptions: Assumptions) -> None:
        self.costs = Costs(profile, accelerator, assumptions)
        self.memory = MemoryModel(self.costs)
        self.limit = accelerator.memory_bytes * assumptions.usable_memory
        self._bounds: dict[object, float] = {}
        self._busy: dict[object, float] = {}

    def bound(self, layout: Layout) -> float:
        """Return a lower bound of the step's seconds, which does not depend on the order of the schedule.

        A rank starts when the first micro-batch arrives, and runs all its operations. After its last backward pass a
        gradient travels to the first stage. Separate weight passes can run during that time.
        """
        key = (*work_key(layout), layout.schedule, layout.shard == "zero3", layout.num_microbatches)
        key = (*key, (layout.dp, layout.shards) if layout.shard == "zero3" else 0)
        found = self._bounds.get(key)
        if found is None:
            times, send, m = self.costs.times(layout), self.costs.send_seconds(layout), layout.num_microbatches
            split = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
            found = fill = drain = 0.0
            for rank in range(layout.pp):
                mine = [times[stage] for stage in self.costs.rank_stages(layout, rank)]
                busy = m * sum(t.forward + t.backward_input for t in mine)
                weights = m * sum(t.backward_weight for t in mine)
                if split:
                    found = max(found, fill + busy + weights, fill + busy + drain)
                else:
                    found = max(found, fill + busy + weights + drain)
                fill += times[rank].forward + send
                drain += times[rank].backward_input + send + (0.0 if split else times[rank].backward_weight)
            self._bounds[key] = found
        tails, head = self.costs.outside(layout)
        return head + found + min(tails)

    def run(self, layout: Layout) -> tuple[Candidate, Timeline]:
        """Simulate a layout, even if it does not fit into memory."""
        costs = self.costs
        line = simulate_long(
            layout.simulated_schedule,
            layout.pp,
            layout.stages_per_rank,
            layout.num_microbatches,
            costs.times(layout),
            costs.send_seconds(layout),
        )
        tails, head = costs.outside(layout)
        seconds = head + max(end + tail for end, tail in zip(line.ends, tails, strict=True))
        profile, accelerator = costs.profile, costs.accelerator
        flops = layout.dp * layout.num_microbatches * profile.model_flops(layout.micro_batch)
        rank = max(range(layout.pp), key=lambda r: line.busy[r])
        mine, m = costs.rank_stages(layout, rank), layout.num_microbatches
        stages = costs.stages(layout)
        exchange = m * sum(stages[s].exchange for s in mine)
        again = m * sum(stages[s].recompute for s in mine)
        work = m * sum(stages[s].forward + stages[s].backward_input + stages[s].backward_weight for s in mine)
        # exchange during recomputation counts as exchange
        inner = exchange / 3 if layout.remat in ("full", "sqrt", "optimal") and again else 0.0
        inner = min(inner, again)
        parts = {
            "compute": work - exchange - again + inner,
            "recomputation": again - inner,
            "tensor-parallel exchange": exchange,
            "pipeline bubble": max(0.0, line.seconds - line.busy[rank]),
            "data-parallel exchange and update": seconds - line.seconds + line.busy[rank] - work,
        }
        candidate = Candidate(
            layout,
            self.memory.of(layout),
            tuple(self.memory.by_rank(layout)),
            seconds,
            parts,
            flops / (seconds * layout.gpus * accelerator.peak_flops),
            line.bubble,
        )
        return candidate, line
