"""The time that a layout needs for each stage and each exchange on an accelerator of the table.

The model makes these assumptions. :class:`Assumptions` sets their numbers.

- Matmuls of any size run at a fixed fraction of the best speed measured on the accelerator. Everything else runs at the
  memory's bandwidth. The two do not overlap.
- Tensor parallelism exchanges the hidden state twice per block in each pass, after attention and after the MLP. It does not
  overlap with computation. If a module has no plan for this, each linear layer's output is gathered on all ranks, and every
  rank computes the operations between the layers. The same applies to the head.
- FP8 multiplies the linear layers of blocks that it makes faster. Its casts move memory, unless kernels are fused.
- Compression reads the saved activations and writes the codes, and later the reverse. Recomputing a block costs its forward
  pass.
- An optimizer on the host steps at the host memory's bandwidth. Gradients and weights cross the link before and after.
- A rank of the pipeline computes while it sends, and its receiver waits.
- Without a pipeline, gradient exchange overlaps with the last micro-batch's backward pass, and weight gathering with the
  first forward pass, except for one block. In a pipeline neither overlaps, as in torch's runtime. With resharding, a block's
  exchange overlaps with the computation of another block.
- HSDP gathers and scatters within a group, and then sums the pieces over the groups.
- A data-parallel group in a node uses the node's links. Across nodes every member has its own network card.
"""

from dataclasses import astuple, dataclass
from functools import cached_property
from math import log2, sqrt

from lightning_eff.planner._launch.arguments import no_fp8
from lightning_eff.planner._launch.assumptions import Assumptions
from lightning_eff.planner.accelerators import Accelerator
from lightning_eff.planner.layouts import Layout, split_blocks
from lightning_eff.planner.profiling import ModuleProfile, Part
from lightning_eff.planner.simulation import StageTimes


@dataclass(frozen=True)
class PartCost:
    """Seconds of one micro-batch in a block, or in the part of the module before or after the blocks.

    Attributes:
        forward: matmuls, memory traffic and exchange of the forward pass.
        backward_input: the backward pass without ``backward_weight``, including recomputation.
        backward_weight: matmuls for the weights' gradients.
        recompute: recomputation in ``backward_input``.
        exchange: tensor-parallel exchange in all of the above.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    exchange: float


class Costs:
    """Computes the seconds of layouts of one module on one accelerator.

    Args:
        profile: the module's profile.
        accelerator: an entry of the table.
        assumptions: the numbers of the model.

    Raises:
        ValueError: if the recipe multiplies in FP8 and the accelerator cannot.
    """

    def __init__(self, profile: ModuleProfile, accelerator: Accelerator, assumptions: Assumptions) -> None:
        self.profile, self.accelerator, self.assumptions = profile, accelerator, assumptions
        self._half = accelerator.matmul_flops * assumptions.efficiency * (0.5 if profile.precision.tf32 else 1.0)
        if profile.precision.fp8 and accelerator.fp8_matmul_flops is None:
            raise ValueError(no_fp8(accelerator))
        self._fp8 = (accelerator.fp8_matmul_flops or 0.0) * assumptions.efficiency
        self._memory = accelerator.memory_bandwidth * assumptions.memory_efficiency
        self.node = accelerator.node_bandwidth * assumptions.node_efficiency
        self.network = accelerator.network_bandwidth * assumptions.network_efficiency
        self._parts: dict[object, PartCost] = {}
        self._stages: dict[object, list[PartCost]] = {}
        self._splits: dict[int, list[range]] = {}
        self._parameters: dict[tuple[int, int], int] = {}
        self._outside: dict[object, tuple[list[float], float]] = {}

    # -- the module

    @cached_property
    def kinds(self) -> tuple[list[int], list[Part]]:
        """The kind of each part, as an index, and the distinct kinds; the parts before and after the blocks come last."""
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
        """Return the blocks of each stage, balanced by FLOPs."""
        if stages not in self._splits:
            p = self.profile
            weights = [b.forward.slope.flops + b.backward.slope.flops for b in p.blocks]
            ends = [part.forward.slope.flops + part.backward.slope.flops for part in (p.before, p.after)]
            self._splits[stages] = split_blocks(weights, ends[0], ends[1], stages)
        return self._splits[stages]

    def indices(self, stage: int, stages: int) -> list[int]:
        """Return the parts of a stage: its blocks, ``num_blocks`` for the part before them, ``num_blocks + 1`` for after."""
        n = len(self.profile.blocks)
        return [*([n] if stage == 0 else []), *self.split(stages)[stage], *([n + 1] if stage == stages - 1 else [])]

    def parameters(self, stage: int, stages: int) -> int:
        """Return the number of parameters of a stage; tied ones count in the first and in the last."""
        order, kinds = self.kinds
        found = self._parameters.get((stage, stages))
        if found is None:
            found = sum(kinds[order[i]].parameters for i in self.indices(stage, stages))
            found += self.profile.shared_parameters if stages > 1 and stage == stages - 1 else 0
            self._parameters[stage, stages] = found
        return found

    # -- seconds

    def part(
        self, kind: int, tp: int, samples: int, remat: str, *, block: bool, fp8: bool = False, bits: int = 32
    ) -> PartCost:
        """Return the cost of a micro-batch of ``samples`` in one part."""
        remat = remat if block else "none"
        fp8 = self.profile.precision.fp8 or (fp8 and block)
        key = (kind, tp, samples, remat, block, fp8, bits)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._part_cost(self.kinds[1][kind], tp, samples, remat, block, fp8, bits)
        return found

    def _part_cost(self, part: Part, tp: int, samples: int, remat: str, block: bool, fp8: bool, bits: int) -> PartCost:
        forward, backward = part.forward.at(samples), part.backward.at(samples)
        apart = self.apart(tp, block=block)
        there, back = self._exchange(part, samples, tp, block=block)
        moved = self._traffic(part, samples, tp, backward=False, block=block)
        linear = 1 / self._half
        casts = 0.0
        if fp8:
            share = self.profile.fp8_share if self.assumptions.pack and block else 1.0
            share = 0.0 if self.assumptions.pack and not block else share
            linear = share / self._fp8 + (1 - share) / self._half
            if self.assumptions.pack and not self.assumptions.fused:
                # a cast reads an operand twice, once for its largest value, and writes one byte per element; operands are
                # about half of a matmul's traffic
                casts = share * 1.25 * samples * part.forward.slope.fused_bytes / 2 / apart / self._memory
        batched = forward.batched_flops / apart / self._half
        ahead = (
            forward.linear_flops / tp * linear + forward.attention_flops / apart / self._half + batched + moved + casts
        )
        weight = backward.linear_flops / 2 / tp * linear
        behind = weight + (backward.batched_flops + backward.attention_flops) / apart / self._half
        behind += self._traffic(part, samples, tp, backward=True, block=block) + 2 * casts
        if bits < 32 and block:
            saved = samples * part.forward.slope.saved_bytes
            coded = saved * (1 + self.coded(bits)) / self._memory
            ahead, behind = ahead + coded, behind + coded
        most = (
            moved if self.assumptions.pack else moved + batched
        )  # this package also keeps the results of batched matmuls
        again = {"none": 0.0, "selective": most}.get(remat, ahead + there)
        return PartCost(
            ahead + there,
            behind + back + again,
            weight,
            again,
            there + back + (there if block and remat not in ("none", "selective") else 0.0),
        )

    def coded(self, bits: int) -> float:
        """Return the bytes that ActivationCompression keeps per saved byte: codes, and 64 bits per group of 256."""
        return (bits + 0.25) / (8 * self.profile.precision.compute_bytes)

    def apart(self, tp: int, *, block: bool) -> int:
        """Return the number of ranks that divide a part's computation between matmuls."""
        if not self.assumptions.pack:
            return tp
        return tp if block and self.profile.paired else 1

    def _exchange(self, part: Part, samples: int, tp: int, *, block: bool) -> tuple[float, float]:
        """Return the seconds of tensor-parallel exchange in a forward and in a backward pass."""
        if tp == 1:
            return 0.0, 0.0

        def reduced(size: float) -> float:
            return self.all_reduce(size, tp, self.node, self.assumptions.node_latency_seconds)

        hidden = reduced(self.profile.hidden_bytes * samples)
        if not self.assumptions.pack or (block and self.profile.paired):
            return (2 * hidden, 2 * hidden) if block else (hidden, hidden)
        results = samples * part.forward.slope.kept_bytes
        if not results:
            return hidden, hidden  # an embedding
        return reduced(results) / 2, reduced(results)

    def _traffic(self, part: Part, samples: int, tp: int, *, backward: bool, block: bool) -> float:
        line = part.backward if backward else part.forward
        if self.assumptions.fused:
            total, wide = samples * line.slope.fused_bytes, samples * line.slope.wide_fused_bytes
        else:
            work = line.at(samples)
            total, wide = work.traffic_bytes, work.wide_traffic_bytes
        return ((total - wide) / self.apart(tp, block=block) + wide / self.wide(tp)) / self._memory

    def wide(self, tp: int) -> int:
        """Return the number of ranks that divide tensors of the hidden state's shape."""
        return tp if self.assumptions.sequence_parallel and not self.assumptions.pack else 1

    def stages(self, layout: Layout) -> list[PartCost]:
        """Return the cost of each stage, the sum over its parts."""
        key = work_key(layout)
        found = self._stages.get(key)
        if found is None:
            order, n = self.kinds[0], len(self.profile.blocks)
            kept = self.kept_blocks(layout)
            found = []
            for stage in range(layout.num_stages):
                costs = [
                    self.part(
                        order[i],
                        layout.tp,
                        layout.micro_batch,
                        "none" if i in kept else layout.remat,
                        block=i < n,
                        fp8=layout.fp8,
                        bits=layout.bits,
                    )
                    for i in self.indices(stage, layout.num_stages)
                ]
                sums = [sum(values) for values in zip(*map(astuple, costs), strict=True)]
                found.append(PartCost(*sums))
            self._stages[key] = found
        return found

    def kept_blocks(self, layout: Layout) -> range:
        """Return the blocks that are not recomputed, for policies that keep the activations of some."""
        n = len(self.profile.blocks)
        if layout.remat == "sqrt":
            return range(n * (segments(n) - 1) // segments(n), n)
        if layout.remat == "optimal":
            return range(n - self.affordable(layout), n)
        return range(0)

    def affordable(self, layout: Layout) -> int:
        """Return how many blocks keep their activations under the budget of "optimal".

        The budget also holds the inputs of the other blocks, and one block that is being recomputed.
        """
        n = len(self.profile.blocks)
        saved = max(b.forward.at(layout.micro_batch).saved_bytes for b in self.profile.blocks)
        held = self.profile.stream * layout.micro_batch
        return max(0, min(n, int((layout.budget * n * saved - saved - n * held) / max(saved - held, 1.0))))

    def times(self, layout: Layout) -> list[StageTimes]:
        """Return the times of each stage's operations, including resharding's exchange where it exceeds the computation."""
        times: list[StageTimes] = []
        for stage, cost in enumerate(self.stages(layout)):
            ahead, behind = cost.forward, cost.backward_input
            if layout.shard == "zero3":
                gather, reduce = self.data_seconds(layout, stage)
                if layout.pp > 1:  # gradients are reduced once per step
                    reduce = 0.0
                parts = max(1, len(self.split(layout.num_stages)[stage]))
                ahead = max(ahead, gather) + gather / parts
                both = cost.backward_weight + behind
                behind += max(0.0, gather + reduce - both) + (gather + reduce) / parts
            times.append(StageTimes(ahead, behind, cost.backward_weight))
        return times

    def send_seconds(self, layout: Layout) -> float:
        """Return the seconds to send a hidden state from stage to stage."""
        one = self.profile.stream if self.assumptions.pack else self.profile.hidden_bytes
        size = one * layout.micro_batch / self.wide(layout.tp)
        if layout.dp * layout.tp * layout.pp <= self.accelerator.node_size:
            return size / self.node + self.assumptions.node_latency_seconds
        return size / self.network + self.assumptions.network_latency_seconds

    @staticmethod
    def all_reduce(size: float, members: int, bandwidth: float, latency: float) -> float:
        """Return the seconds of a ring all-reduce, in which every member sends ``2 (n - 1) / n`` of the tensor."""
        return 2 * (members - 1) / members * size / bandwidth + 2 * log2(members) * latency

    def data_seconds(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Return the seconds to gather a stage's weights and to reduce and scatter its gradients over the data ranks."""
        p = self.parameters(stage, layout.num_stages) / layout.tp
        precision = self.profile.precision
        gathered = precision.weight_bytes if self.assumptions.pack else precision.compute_bytes
        members = layout.dp if layout.shard == "none" else layout.group
        scatter = self._gather(p * precision.grad_bytes, layout, members)
        groups = layout.dp // members
        if groups > 1:  # HSDP sums the pieces over the groups
            scatter += 2 * self._gather(p / members * precision.grad_bytes, layout, groups, stride=members)
        return self._gather(p * gathered, layout, members), scatter

    def _gather(self, size: float, layout: Layout, members: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of ``size`` bytes, in the node and between nodes at once.

        The members are data ranks that are ``stride`` apart.
        """
        if members == 1:
            return 0.0
        local = min(members, max(1, self.accelerator.node_size // (layout.tp * stride)))
        nodes = members / local
        a = self.assumptions
        within = (local - 1) / local * size / self.node + log2(local) * a.node_latency_seconds
        between = (nodes - 1) / nodes * size / local / self.network + log2(max(nodes, 1)) * a.network_latency_seconds
        return max(within, between)

    def outside(self, layout: Layout) -> tuple[list[float], float]:
        """Return each rank's seconds after its last operation, and the seconds before the first operation of the step.

        They are spent on data-parallel exchange and the optimizer's update.
        """
        v_shaped = layout.schedule in ("ZBVZeroBubble", "DualPipeV")
        key = (
            layout.tp,
            layout.pp,
            layout.num_stages,
            layout.dp,
            layout.shard,
            layout.shards,
            v_shaped,
            layout.offload,
        )
        key = (*key, work_key(layout) if layout.pp == 1 else None)
        found = self._outside.get(key)
        if found is None:
            found = self._outside[key] = self._outside_seconds(layout)
        return found

    def _outside_seconds(self, layout: Layout) -> tuple[list[float], float]:
        last = self.stages(layout)
        head, tails = 0.0, [0.0] * layout.pp
        for rank in range(layout.pp):
            mine = self.rank_stages(layout, rank)
            gather = reduce = 0.0
            if layout.shard != "zero3" or (layout.pp > 1 and self.assumptions.pack):
                pairs = [self.data_seconds(layout, stage) for stage in mine]
                gather = sum(g for g, _ in pairs) if layout.shard == "zero2" else 0.0
                reduce = sum(r for _, r in pairs) * (2 if layout.shard == "none" else 1)
                if layout.pp == 1:
                    blocks = max(1, len(self.profile.blocks))
                    behind = last[0].backward_input + last[0].backward_weight
                    gather = max(gather / blocks, gather - last[0].forward)
                    reduce = max(reduce / blocks, reduce - behind)
            if rank == 0:
                head = gather
            owned = sum(self.parameters(stage, layout.num_stages) for stage in mine) / layout.tp
            owned /= layout.group
            p = self.profile.precision
            moved = owned * (2 * p.weight_bytes + p.grad_bytes + 2 * self.profile.state_bytes)
            update = moved / self._memory
            if layout.offload:
                sent = owned * max(p.weight_bytes, p.grad_bytes)
                update = moved / self.assumptions.host_memory + 2 * sent / self.assumptions.host_link
            tails[rank] = reduce + update
        return tails, head

    @staticmethod
    def rank_stages(layout: Layout, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        if layout.schedule in ("ZBVZeroBubble", "DualPipeV"):
            return [rank, 2 * layout.pp - 1 - rank]
        return list(range(rank, layout.num_stages, layout.pp))


def work_key(layout: Layout) -> tuple[object, ...]:
    """Return the fields of a layout that determine the work of a micro-batch."""
    return (layout.tp, layout.micro_batch, layout.remat, layout.budget, layout.num_stages, layout.fp8, layout.bits)


def segments(n: int) -> int:
    """Return the number of segments into which Rematerialization(policy="sqrt") cuts ``n`` blocks."""
    return max(1, round(sqrt(n)))
