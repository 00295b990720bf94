"""The memory of a layout on each rank: weights, gradients, optimizer state, activations, buffers and working memory."""

from dataclasses import astuple, dataclass

from lightning_eff.planner.costs import Costs, segments, work_key
from lightning_eff.planner.layouts import Layout
from lightning_eff.planner.schedules import SCHEDULES
from lightning_eff.planner.simulation import peak_in_flight

_SMALL = 2**20  # HybridParallelStrategy's min_num_params


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        weights: the rank's parameters.
        gathered: gathered weights of sharded parameters, and copies of weights in another type that are made once.
        gradients: gradients for the optimizer; in a pipeline also the last step's.
        unreduced: gradients of sharded parameters before they are scattered.
        optimizer: optimizer state.
        activations: micro-batches in flight, with autocast's copies of weights for each.
        buffers: a pipeline's receive buffers.
        working: a recomputed block, the largest gradients, and the optimizer's step.
    """

    weights: float
    gathered: float
    gradients: float
    unreduced: float
    optimizer: float
    activations: float
    buffers: float
    working: float

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return float(sum(astuple(self)))


class MemoryModel:
    """Predicts the memory of layouts, and caches results that layouts share.

    Args:
        costs: the module's costs on the accelerator.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._held: dict[object, list[tuple[float, float, float]]] = {}
        self._kept: dict[object, list[tuple[float, float, float, float, float]]] = {}
        self._saved: dict[object, float] = {}

    def of(self, layout: Layout) -> Memory:
        """Return the memory of the rank that needs the most."""
        return max(self.by_rank(layout), key=lambda memory: memory.total)

    def by_rank(self, layout: Layout) -> list[Memory]:
        """Return the memory of each rank of the pipeline; all ranks of a stage need the same."""
        found: list[Memory] = []
        for held, states in zip(self._activations(layout), self._states(layout), strict=True):
            activations, buffers, working = held
            weights, gathered, gradients, unreduced, optimizer = states
            if self.costs.assumptions.pack:
                if layout.pp == 1:  # the backward pass frees the head's and the last block's activations first
                    unreduced = max(0.0, unreduced - self._gone_first(layout))
                # the optimizer's step, and DDP's sums, start after activations are freed
                during = activations + working + gathered + unreduced
                working += max(0.0, weights - during)
            found.append(Memory(weights, gathered, gradients, unreduced, optimizer, activations, buffers, working))
        return found

    def _states(self, layout: Layout) -> list[tuple[float, float, float, float, float]]:
        """Return each rank's bytes of weights, gathered weights, gradients, unreduced gradients and optimizer state."""
        v_shaped = layout.schedule in ("ZBVZeroBubble", "DualPipeV")
        key = (layout.tp, layout.pp, layout.num_stages, layout.dp, layout.shard, layout.shards, v_shaped)
        key = (*key, layout.num_microbatches > 1, layout.offload, layout.schedule == "none")
        found = self._kept.get(key)
        if found is None:
            states = self._states_here if self.costs.assumptions.pack else self._states_elsewhere
            found = self._kept[key] = [states(layout, rank) for rank in range(layout.pp)]
        return found

    def _gone_first(self, layout: Layout) -> float:
        """Return the bytes of activations that the backward pass frees before it leaves the last block."""
        order, n = self.costs.kinds[0], len(self.costs.profile.blocks)
        last = [self._part(order[n - 1], layout, layout.remat, block=True)] if n else []
        return self._part(order[n + 1], layout, "none", block=False) + sum(last)

    def _parts(self, layout: Layout, rank: int) -> tuple[list[int], int]:
        """Return the parameters of each of a rank's blocks, and those outside the blocks, after tensor parallelism."""
        costs, n = self.costs, len(self.costs.profile.blocks)
        order, kinds = costs.kinds
        stages = costs.rank_stages(layout, rank)
        at = [i for s in stages for i in costs.indices(s, layout.num_stages) if i < n]
        blocks = [kinds[order[i]].parameters // layout.tp for i in at]
        every = sum(costs.parameters(stage, layout.num_stages) for stage in stages) // layout.tp
        if layout.stages_per_rank > 1 and {0, layout.num_stages - 1} <= set(stages):
            every -= costs.profile.shared_parameters // layout.tp  # the rank has the first and the last stage
        return blocks, every - sum(blocks)

    def _states_here(self, layout: Layout, rank: int) -> tuple[float, float, float, float, float]:
        precision = self.costs.profile.precision
        blocks, outside = self._parts(layout, rank)
        w, g = precision.weight_bytes, precision.grad_bytes
        again = 2 if layout.pp > 1 else 1
        states = 0.0 if layout.offload else self.costs.profile.state_bytes
        p = sum(blocks) + outside
        if layout.shard == "none":
            return p * w, 0.0, again * p * g, 0.0, p * states
        k = layout.group
        if layout.pp == 1:
            small = [b for b in blocks if b * layout.tp < _SMALL]
            with_rest = outside + sum(small)  # gathered from the forward pass to the end of the backward pass
            two = 2 * max(
                [0, *(b for b in blocks if b * layout.tp >= _SMALL)]
            )  # the running block and the prefetched one
            # a group's flat buffer stays until the next group's arrives, and the root's stays to the end
            return p / k * w, (2 * with_rest + two) * w, p / k * g, two * g, p / k * states
        # in a pipeline gathered weights stay, and gradients are summed over micro-batches before they are reduced;
        # with several stages per rank, parameters outside the blocks are not sharded
        divided, rest = (p, 0) if layout.stages_per_rank == 1 else (sum(blocks), outside)
        own = divided / k + rest
        gathered = divided + max(blocks)  # plus one block's flat buffer
        return own * w, gathered * w, again * own * g, divided * g, own * states

    def _states_elsewhere(self, layout: Layout, rank: int) -> tuple[float, float, float, float, float]:
        costs, profile = self.costs, self.costs.profile
        stages = costs.rank_stages(layout, rank)
        p = sum(costs.parameters(stage, layout.num_stages) for stage in stages) / layout.tp
        order, kinds = costs.kinds
        parts = [kinds[order[i]].parameters for s in stages for i in costs.indices(s, layout.num_stages)]
        two = 2 * max(parts) / layout.tp  # the running block and the prefetched one
        precision = profile.precision
        copies = precision.compute_bytes if precision.weight_bytes != precision.compute_bytes else 0
        if layout.shard == "none":
            return p * precision.weight_bytes, p * copies, p * precision.grad_bytes, 0.0, p * profile.state_bytes
        own = p / layout.group
        once = layout.shard == "zero2"
        gathered = p if once else min(p, two)
        unreduced = p if once and layout.num_microbatches > 1 else min(p, two)
        return (
            own * precision.weight_bytes,
            gathered * precision.compute_bytes,
            own * precision.grad_bytes,
            unreduced * precision.grad_bytes,
            own * profile.state_bytes,
        )

    def _activations(self, layout: Layout) -> list[tuple[float, float, float]]:
        """Return each rank's bytes of activations in flight, buffers and working memory."""
        name, p, v, m = layout.simulated_schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches
        key = (name, p, v, m, *work_key(layout))
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._work_out(layout, moments_of(name, p, v, m))
        return found

    def _work_out(
        self, layout: Layout, moments: tuple[tuple[tuple[int, ...], ...], ...]
    ) -> list[tuple[float, float, float]]:
        costs, n = self.costs, len(self.costs.profile.blocks)
        pack = costs.assumptions.pack
        one = costs.profile.stream if pack else costs.profile.hidden_bytes / costs.wide(layout.tp)
        hidden = one * layout.micro_batch
        order, kept = costs.kinds[0], costs.kept_blocks(layout)
        ranks: list[tuple[float, float, float]] = []
        for rank in range(layout.pp):
            stages = costs.rank_stages(layout, rank)
            sizes: list[float] = []
            working = buffers = casts = 0.0
            for stage in stages:
                size = hidden if layout.pp > 1 else 0.0  # the stage's output, until its gradient arrives
                first, last = stage == 0, stage == layout.num_stages - 1
                if pack and layout.pp > 1:
                    # torch allocates buffers for all micro-batches at once, and received ones keep their gradients too; a
                    # received tensor is also the first block's saved input
                    buffers += layout.num_microbatches * hidden * (3 * (not first) + (not last))
                    size -= 0.0 if first else hidden
                for i in costs.indices(stage, layout.num_stages):
                    remat = "none" if i in kept else layout.remat
                    size += self._part(order[i], layout, remat, block=i < n)
                    whole = self._part(order[i], layout, "none", block=i < n)
                    largest = self._gradient(order[i], layout, block=i < n)
                    again = whole if i < n and remat != "none" else 0.0
                    working = max(working, again + largest)
                    casts += self._fixed(order[i], layout) if i < n and remat != "none" else 0.0
                sizes.append(size)
            if layout.remat == "sqrt" and kept:
                inside = max(1, len(kept))
                working += (inside - 1) * max(self._part(order[i], layout, "none", block=True) for i in range(n))
                sizes = [size - hidden * (n - len(kept) - (segments(n) - 1)) for size in sizes]
            peak = max(sum(c * s for c, s in zip(counts, sizes, strict=True)) for counts in moments[rank])
            # at the end of a forward pass autocast still holds copies of all weights; a backward pass has one block's
            ranks.append((peak, buffers, max(working, casts)))
        return ranks

    def _fixed(self, kind: int, layout: Layout) -> float:
        """Return the bytes of the weight copies that autocast makes for each micro-batch."""
        if not self.costs.assumptions.pack:
            return 0.0
        share = 1.0 - (self.costs.profile.fp8_share if layout.fp8 else 0.0)
        return share * self.costs.kinds[1][kind].forward.fixed.saved_bytes / layout.tp

    def _gradient(self, kind: int, layout: Layout, *, block: bool) -> float:
        """Return the bytes of the largest tensors in a part's backward pass, the one it reads and the one it writes."""
        work = self.costs.kinds[1][kind].backward.at(layout.micro_batch)
        largest = 2 * work.largest_activation_bytes if self.costs.assumptions.pack else work.largest_bytes
        return largest / self.costs.apart(layout.tp, block=block)

    def _part(self, kind: int, layout: Layout, remat: str, *, block: bool) -> float:
        """Return the bytes that one part keeps for one micro-batch."""
        remat = remat if block else "none"
        key = (kind, layout.tp, layout.micro_batch, remat, block, layout.bits, layout.fp8)
        found = self._saved.get(key)
        if found is None:
            costs, pack = self.costs, self.costs.assumptions.pack
            line = costs.kinds[1][kind].forward.slope
            spread, samples = costs.wide(layout.tp), layout.micro_batch
            hidden = (costs.profile.stream if pack else costs.profile.hidden_bytes / spread) * samples
            if remat not in ("none", "selective"):
                found = hidden
            else:
                total = line.saved_bytes if remat == "none" else line.kept_bytes
                total += line.batched_kept_bytes if remat == "selective" and pack else 0.0
                wide = line.wide_saved_bytes if remat == "none" else line.wide_kept_bytes
                found = samples * ((total - wide) / costs.apart(layout.tp, block=block) + wide / spread)
                found *= costs.coded(layout.bits) if block and layout.bits < 32 else 1.0
                # with pack=False weight copies are made once and count as weights
                found += hidden if remat == "selective" else self._fixed(kind, layout)
            self._saved[key] = found
        return found


def moments_of(name: str, p: int, v: int, m: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return :func:`peak_in_flight`, computed with no more micro-batches than the peak needs."""
    if name in ("GPipe", "LoopedBFS"):
        return (((m,) * v,),) * p
    if SCHEDULES[name].interleaved:
        rounds = max(1, m // p)
        few = m // rounds * min(rounds, 3)
    else:
        few = min(m, 4 * p)
    return peak_in_flight(name, p, v, few)
