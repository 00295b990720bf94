"""The memory that a layout takes on its fullest rank: weights, gradients, optimizer state, activations in flight, logits."""

from dataclasses import dataclass

from lightning_eff.planner.costs import Costs
from lightning_eff.planner.layouts import Layout
from lightning_eff.planner.schedules import SCHEDULES
from lightning_eff.planner.simulation import peak_in_flight


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes:
        weights: at rest, and gathered where sharded.
        gradients: accumulated, and not yet scattered where sharded.
        optimizer: its state.
        activations: of the micro-batches in flight.
        working: of the block that is computed again, and of the logits' gradient.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """Of all of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


class MemoryModel:
    """Memory of layouts; what many layouts share is worked out once.

    Args:
        costs: of the module on the accelerator.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._held: dict[object, list[tuple[float, float]]] = {}
        self._kept: dict[object, list[tuple[float, float, float]]] = {}
        self._largest: dict[tuple[int, int, int], float] = {}
        self._saved: dict[tuple[int, int, int, str], float] = {}

    def of(self, layout: Layout) -> Memory:
        """The memory of the rank that needs the most."""
        held, states = self._activations(layout), self._states(layout)
        fullest = max(range(layout.pp), key=lambda rank: sum(held[rank]) + sum(states[rank]))
        return Memory(*states[fullest], *held[fullest])

    def _states(self, layout: Layout) -> list[tuple[float, float, float]]:
        """For each rank, bytes of weights, gradients and optimizer state."""
        v_shaped = layout.schedule in ("ZBVZeroBubble", "DualPipeV")
        key = (layout.tp, layout.pp, layout.num_stages, layout.dp, layout.shard, v_shaped, layout.num_microbatches > 1)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = [self._states_of(layout, rank) for rank in range(layout.pp)]
        return found

    def _states_of(self, layout: Layout, rank: int) -> tuple[float, float, float]:
        costs, profile = self.costs, self.costs.profile
        stages = costs.rank_stages(layout, rank)
        p = sum(costs.parameters(stage, layout.num_stages) for stage in stages) / layout.tp
        order, kinds = costs.kinds
        parts = [kinds[order[i]].parameters for s in stages for i in costs.indices(s, layout.num_stages)]
        two = 2 * max(parts) / layout.tp  # one block at work, the next one gathered ahead
        precision = profile.precision
        copies = precision.compute_bytes if precision.weight_bytes != precision.compute_bytes else 0
        if layout.shard == "none":
            return p * (precision.weight_bytes + copies), p * precision.grad_bytes, p * profile.state_bytes
        own = p / layout.dp
        weights, gradients = own * precision.weight_bytes, own * precision.grad_bytes
        if layout.shard == "zero2":
            weights += p * precision.compute_bytes
            gradients += (p if layout.num_microbatches > 1 else min(p, two)) * precision.grad_bytes
        else:
            weights += min(p, two) * precision.compute_bytes
            gradients += min(p, two) * precision.grad_bytes
        return weights, gradients, own * profile.state_bytes

    def _activations(self, layout: Layout) -> list[tuple[float, float]]:
        """For each rank, bytes of activations in flight and of what is at work."""
        name, p, v, m = layout.simulated_schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches
        key = (name, p, v, m, layout.tp, layout.micro_batch, layout.remat)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._work_out(layout, moments_of(name, p, v, m))
        return found

    def _work_out(self, layout: Layout, moments: tuple[tuple[tuple[int, ...], ...], ...]) -> list[tuple[float, float]]:
        costs, n = self.costs, len(self.costs.profile.blocks)
        hidden = costs.profile.hidden_bytes * layout.micro_batch / costs.wide(layout.tp)
        order = costs.kinds[0]
        ranks: list[tuple[float, float]] = []
        for rank in range(layout.pp):
            stages = costs.rank_stages(layout, rank)
            sizes: list[float] = []
            working = 0.0
            for stage in stages:
                size = hidden if layout.pp > 1 else 0.0  # the stage's output, until its gradient has come
                for i in costs.indices(stage, layout.num_stages):
                    size += self._part(order[i], layout, block=i < n)
                    whole = self._part(order[i], layout, block=False)
                    largest = self._gradient(order[i], layout)
                    again = whole if i < n and layout.remat != "none" else 0.0
                    working = max(working, again + largest)
                sizes.append(size)
            peak = max(sum(c * s for c, s in zip(counts, sizes, strict=True)) for counts in moments[rank])
            ranks.append((peak, working))
        return ranks

    def _gradient(self, kind: int, layout: Layout) -> float:
        """The largest tensor of a part's backward pass."""
        key = (kind, layout.tp, layout.micro_batch)
        if key not in self._largest:
            work = self.costs.kinds[1][kind].backward.at(layout.micro_batch)
            self._largest[key] = work.largest_bytes / layout.tp
        return self._largest[key]

    def _part(self, kind: int, layout: Layout, *, block: bool) -> float:
        """What one part keeps of one micro-batch; ``block=False`` keeps everything, whatever ``remat`` says."""
        remat = layout.remat if block else "none"
        key = (kind, layout.tp, layout.micro_batch, remat)
        found = self._saved.get(key)
        if found is None:
            costs = self.costs
            line = costs.kinds[1][kind].forward
            spread, samples = costs.wide(layout.tp), layout.micro_batch
            hidden = costs.profile.hidden_bytes * samples / spread
            # what does not grow with the samples are copies of weights in another type: they count as weights
            if remat == "full":
                found = hidden
            else:
                total = line.slope.saved_bytes if remat == "none" else line.slope.kept_bytes
                wide = line.slope.wide_saved_bytes if remat == "none" else line.slope.wide_kept_bytes
                found = samples * ((total - wide) / layout.tp + wide / spread)
                found += hidden if remat == "selective" else 0.0
            self._saved[key] = found
        return found


def moments_of(name: str, p: int, v: int, m: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """:func:`peak_in_flight`, without going through more micro-batches than the peak needs."""
    if name in ("GPipe", "LoopedBFS"):
        return (((m,) * v,),) * p
    if SCHEDULES[name].interleaved:
        rounds = max(1, m // p)
        few = m // rounds * min(rounds, 3)
    else:
        few = min(m, 4 * p)
    return peak_in_flight(name, p, v, few)
