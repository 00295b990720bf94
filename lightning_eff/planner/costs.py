"""What a layout costs: seconds of each stage and of each exchange, on an accelerator of the table.

Assumptions, all of which :class:`Assumptions` can change:

- Matmuls run at a fixed share of the best rate measured on the accelerator, whatever their size; everything else runs at
  the memory's bandwidth. One after the other.
- Tensor parallelism exchanges the hidden state twice a block in each pass (after attention, after the MLP), and nothing
  computes meanwhile.
- A rank of the pipeline computes while its results are sent; the receiver waits for them.
- Without a pipeline, data-parallel exchange hides behind the last micro-batch's backward pass and gathering behind the
  first's forward pass, up to one block's share; in a pipeline both come before and after it, as torch's runtime has them.
  With resharding, a block's exchange hides behind another block's computation.
- A data-parallel group within a node uses the node's links; across nodes every member has its own network card.
"""

from dataclasses import astuple, dataclass
from functools import cached_property
from math import log2

from lightning_eff.planner._launch.arguments import no_fp8
from lightning_eff.planner._launch.assumptions import Assumptions
from lightning_eff.planner.accelerators import Accelerator
from lightning_eff.planner.layouts import Layout, split_blocks
from lightning_eff.planner.profiling import ModuleProfile, Part
from lightning_eff.planner.simulation import StageTimes


@dataclass(frozen=True)
class PartCost:
    """Seconds of one micro-batch in a block, or in what is before or after the blocks.

    Attributes:
        forward: matmuls, memory and exchange.
        backward_input: of the backward pass but for ``backward_weight``; with what is computed again.
        backward_weight: matmuls for the weights' gradients.
        recompute: the part of ``backward_input`` that is computed again.
        exchange: the part of all that is tensor-parallel exchange.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    exchange: float


class Costs:
    """Seconds of layouts of one module on one accelerator.

    Args:
        profile: of the module.
        accelerator: from the table.
        assumptions: see there.

    Raises:
        ValueError: if the recipe multiplies in FP8 and the accelerator cannot.
    """

    def __init__(self, profile: ModuleProfile, accelerator: Accelerator, assumptions: Assumptions) -> None:
        self.profile, self.accelerator, self.assumptions = profile, accelerator, assumptions
        self._half = accelerator.matmul_flops * assumptions.efficiency * (0.5 if profile.precision.tf32 else 1.0)
        self._linear = self._half
        if profile.precision.fp8:
            if accelerator.fp8_matmul_flops is None:
                raise ValueError(no_fp8(accelerator))
            self._linear = accelerator.fp8_matmul_flops * assumptions.efficiency
        self._memory = accelerator.memory_bandwidth * assumptions.memory_efficiency
        self.node = accelerator.node_bandwidth * assumptions.node_efficiency
        self.network = accelerator.network_bandwidth * assumptions.network_efficiency
        self._parts: dict[tuple[int, int, int, str], PartCost] = {}
        self._stages: dict[tuple[int, int, str, int], list[PartCost]] = {}
        self._splits: dict[int, list[range]] = {}
        self._parameters: dict[tuple[int, int], int] = {}
        self._outside: dict[object, tuple[list[float], float]] = {}

    # -- the module

    @cached_property
    def kinds(self) -> tuple[list[int], list[Part]]:
        """For each block the index of its kind, and the kinds: equal blocks are worked out once. Before and after last."""
        seen: dict[object, int] = {}
        kinds: list[Part] = []
        order: list[int] = []
        for part in (*self.profile.blocks, self.profile.before, self.profile.after):
            key = astuple(part)
            if key not in seen:
                seen[key] = len(kinds)
                kinds.append(part)
            order.append(seen[key])
        return order, kinds

    def split(self, stages: int) -> list[range]:
        """The blocks of each stage, balanced by FLOPs."""
        if stages not in self._splits:
            p = self.profile
            weights = [b.forward.slope.flops + b.backward.slope.flops for b in p.blocks]
            ends = [part.forward.slope.flops + part.backward.slope.flops for part in (p.before, p.after)]
            self._splits[stages] = split_blocks(weights, ends[0], ends[1], stages)
        return self._splits[stages]

    def indices(self, stage: int, stages: int) -> list[int]:
        """The parts of a stage: its blocks, and ``num_blocks`` for before, ``num_blocks + 1`` for after."""
        n = len(self.profile.blocks)
        return [*([n] if stage == 0 else []), *self.split(stages)[stage], *([n + 1] if stage == stages - 1 else [])]

    def parameters(self, stage: int, stages: int) -> int:
        """Of a stage; tied ones are on both ends."""
        order, kinds = self.kinds
        found = self._parameters.get((stage, stages))
        if found is None:
            found = sum(kinds[order[i]].parameters for i in self.indices(stage, stages))
            found += self.profile.shared_parameters if stages > 1 and stage == stages - 1 else 0
            self._parameters[stage, stages] = found
        return found

    # -- seconds

    def part(self, kind: int, tp: int, samples: int, remat: str, *, block: bool) -> PartCost:
        """A micro-batch of ``samples`` in one part."""
        key = (kind, tp, samples, remat if block else "none")
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._work_out(self.kinds[1][kind], tp, samples, remat, block)
        return found

    def _work_out(self, part: Part, tp: int, samples: int, remat: str, block: bool) -> PartCost:
        forward, backward = part.forward.at(samples), part.backward.at(samples)
        if tp == 1:
            exchange = 0.0
        else:
            one = self.all_reduce(
                self.profile.hidden_bytes * samples, tp, self.node, self.assumptions.node_latency_seconds
            )
            exchange = one * (2 if block else 1)
        moved = self._traffic(part, samples, tp, backward=False)
        batched = forward.batched_flops / tp / self._half
        ahead = forward.linear_flops / tp / self._linear + forward.attention_flops / tp / self._half + batched + moved
        weight = backward.linear_flops / 2 / tp / self._linear
        behind = weight + (backward.batched_flops + backward.attention_flops) / tp / self._half
        behind += self._traffic(part, samples, tp, backward=True)
        again = {"none": 0.0, "selective": moved + batched, "full": ahead + exchange}[remat if block else "none"]
        return PartCost(
            ahead + exchange,
            behind + exchange + again,
            weight,
            again,
            exchange * (3 if block and remat == "full" else 2),
        )

    def _traffic(self, part: Part, samples: int, tp: int, *, backward: bool) -> float:
        line = part.backward if backward else part.forward
        if self.assumptions.fused:
            total, wide = samples * line.slope.fused_bytes, samples * line.slope.wide_fused_bytes
        else:
            work = line.at(samples)
            total, wide = work.traffic_bytes, work.wide_traffic_bytes
        return ((total - wide) / tp + wide / self.wide(tp)) / self._memory

    def wide(self, tp: int) -> int:
        """Over how many ranks tensors of the hidden state's shape are spread."""
        return tp if self.assumptions.sequence_parallel else 1

    def stages(self, layout: Layout) -> list[PartCost]:
        """The sums over each stage's parts."""
        key = (layout.tp, layout.micro_batch, layout.remat, layout.num_stages)
        found = self._stages.get(key)
        if found is None:
            order, n = self.kinds[0], len(self.profile.blocks)
            found = []
            for stage in range(layout.num_stages):
                costs = [
                    self.part(order[i], layout.tp, layout.micro_batch, layout.remat, block=i < n)
                    for i in self.indices(stage, layout.num_stages)
                ]
                sums = [sum(values) for values in zip(*map(astuple, costs), strict=True)]
                found.append(PartCost(*sums))
            self._stages[key] = found
        return found

    def times(self, layout: Layout) -> list[StageTimes]:
        """Of the operations to simulate; with resharding, exchange that is longer than the computation shows."""
        times: list[StageTimes] = []
        for stage, cost in enumerate(self.stages(layout)):
            ahead, behind = cost.forward, cost.backward_input
            if layout.shard == "zero3":
                gather, reduce = self.data_seconds(layout, stage)
                parts = max(1, len(self.split(layout.num_stages)[stage]))
                ahead = max(ahead, gather) + gather / parts
                both = cost.backward_weight + behind
                behind += max(0.0, gather + reduce - both) + (gather + reduce) / parts
            times.append(StageTimes(ahead, behind, cost.backward_weight))
        return times

    def send_seconds(self, layout: Layout) -> float:
        """Of a hidden state from stage to stage."""
        size = self.profile.hidden_bytes * layout.micro_batch / self.wide(layout.tp)
        if layout.dp * layout.tp * layout.pp <= self.accelerator.node_size:
            return size / self.node + self.assumptions.node_latency_seconds
        return size / self.network + self.assumptions.network_latency_seconds

    @staticmethod
    def all_reduce(size: float, members: int, bandwidth: float, latency: float) -> float:
        """A ring: every member sends ``2 (n - 1) / n`` of the tensor."""
        return 2 * (members - 1) / members * size / bandwidth + 2 * log2(members) * latency

    def data_seconds(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Gathering a stage's weights and scattering the sums of its gradients, over the data-parallel group."""
        p = self.parameters(stage, layout.num_stages) / layout.tp
        precision = self.profile.precision
        return self._gather(p * precision.compute_bytes, layout), self._gather(p * precision.grad_bytes, layout)

    def _gather(self, size: float, layout: Layout) -> float:
        """All-gather or reduce-scatter of ``size`` bytes in all: in the node and between nodes at the same time."""
        if layout.dp == 1:
            return 0.0
        local = min(layout.dp, max(1, self.accelerator.node_size // layout.tp))
        nodes = layout.dp / local
        a = self.assumptions
        within = (local - 1) / local * size / self.node + log2(local) * a.node_latency_seconds
        between = (nodes - 1) / nodes * size / local / self.network + log2(max(nodes, 1)) * a.network_latency_seconds
        return max(within, between)

    def outside(self, layout: Layout) -> tuple[list[float], float]:
        """Seconds before the pipeline's first operation, for each rank those after its last: exchange and the update."""
        v_shaped = layout.schedule in ("ZBVZeroBubble", "DualPipeV")
        key = (layout.tp, layout.pp, layout.num_stages, layout.dp, layout.shard, v_shaped)
        key = (*key, (layout.micro_batch, layout.remat) if layout.pp == 1 else None)
        found = self._outside.get(key)
        if found is None:
            found = self._outside[key] = self._around(layout)
        return found

    def _around(self, layout: Layout) -> tuple[list[float], float]:
        last = self.stages(layout)
        head, tails = 0.0, [0.0] * layout.pp
        for rank in range(layout.pp):
            mine = self.rank_stages(layout, rank)
            gather = reduce = 0.0
            if layout.shard != "zero3":
                pairs = [self.data_seconds(layout, stage) for stage in mine]
                gather = sum(g for g, _ in pairs) if layout.shard == "zero2" else 0.0
                reduce = sum(r for _, r in pairs) * (1 if layout.shard == "zero2" else 2)
                if layout.pp == 1:
                    blocks = max(1, len(self.profile.blocks))
                    behind = last[0].backward_input + last[0].backward_weight
                    gather = max(gather / blocks, gather - last[0].forward)
                    reduce = max(reduce / blocks, reduce - behind)
            if rank == 0:
                head = gather
            owned = sum(self.parameters(stage, layout.num_stages) for stage in mine) / layout.tp
            owned /= layout.dp if layout.shard != "none" else 1
            p = self.profile.precision
            update = owned * (2 * p.weight_bytes + p.grad_bytes + 2 * self.profile.state_bytes) / self._memory
            tails[rank] = reduce + update
        return tails, head

    @staticmethod
    def rank_stages(layout: Layout, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        if layout.schedule in ("ZBVZeroBubble", "DualPipeV"):
            return [rank, 2 * layout.pp - 1 - rank]
        return list(range(rank, layout.num_stages, layout.pp))
