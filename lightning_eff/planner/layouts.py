"""Layouts: the ways to divide a module's training over accelerators, and the rules for which are possible."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_eff.planner._launch.abilities import Abilities
from lightning_eff.planner.profiling import ModuleProfile
from lightning_eff.planner.schedules import SCHEDULES

#: Policies of Rematerialization. "none" keeps all activations, "selective" those of linear layers and fused attention, "full"
#: each block's input, "sqrt" the inputs of about sqrt(n) segments, and "optimal" as many blocks as a budget allows.
REMAT = ("none", "selective", "full", "sqrt", "optimal")
#: Data parallelism. "none" keeps whole copies. "zero2" is FSDP2 with ``reshard_after_forward=False``: it gathers weights and
#: reduces gradients once per step. "zero3" is FSDP2 with resharding: it does both once per micro-batch. Under a pipeline it
#: gathers weights for each forward pass and reduces gradients once.
SHARD = ("none", "zero2", "zero3")
#: The values of ``memory_budget`` to try for Rematerialization(policy="optimal").
BUDGETS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
#: The values of ``bits`` to try for ActivationCompression.
BITS = (8, 4)
_STAGES = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Layout:
    """One way to divide the work.

    Attributes:
        dp: data parallel size.
        tp: tensor parallel size.
        pp: ranks of the pipeline.
        shard: one of :data:`SHARD`.
        schedule: torch's name of the pipeline schedule; "none" without a pipeline.
        stages_per_rank: pipeline stages on each rank.
        micro_batch: samples in a micro-batch of one replica.
        num_microbatches: micro-batches per step of one replica.
        remat: one of :data:`REMAT`.
        shards: data ranks that share one copy of the parameters (HSDP); 0 means all data ranks.
        budget: the memory budget of "optimal".
        fp8: the blocks' linear layers multiply in FP8.
        bits: bits of saved activations; 32 means no compression.
        offload: the optimizer's state and step are on the host.
    """

    dp: int
    tp: int
    pp: int
    shard: str
    schedule: str
    stages_per_rank: int
    micro_batch: int
    num_microbatches: int
    remat: str
    shards: int = 0
    budget: float = 1.0
    fp8: bool = False
    bits: int = 32
    offload: bool = False

    @property
    def group(self) -> int:
        """Data ranks that divide the parameters; 1 if every rank has all of them."""
        return 1 if self.shard == "none" else self.shards or self.dp

    @property
    def plain(self) -> bool:
        """Whether each process holds the whole module, as under DDP or on a single device."""
        return self.shard == "none" and self.tp == self.pp == 1

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        return self.pp * self.stages_per_rank

    @property
    def gpus(self) -> int:
        """The total number of accelerators."""
        return self.dp * self.tp * self.pp

    @property
    def simulated_schedule(self) -> str:
        """The schedule to simulate. Without a pipeline it is 1F1B, which runs one micro-batch after the other."""
        return "1F1B" if self.pp == 1 else self.schedule


def divisors(n: int) -> list[int]:
    """Return the divisors of ``n`` in rising order."""
    return [k for k in range(1, n + 1) if n % k == 0]


def enumerate_layouts(
    profile: ModuleProfile,
    gpus: int,
    node_size: int,
    global_batch: int,
    refused: Counter[str],
    able: Abilities | None = None,
    *,
    fp8: bool = False,
) -> Iterator[Layout]:
    """Yield every possible layout of ``gpus`` accelerators.

    Args:
        profile: the module's profile.
        gpus: total number of accelerators.
        node_size: accelerators in a node; tensor parallelism stays within a node.
        global_batch: samples per step.
        refused: counts, for each reason, the combinations that it ruled out.
        able: options that the recipe excludes; None excludes nothing.
        fp8: whether the accelerator supports FP8.
    """
    able = able or Abilities()
    for tp in divisors(gpus):
        rest = gpus // tp
        why = _tensor_refusal(profile, tp, node_size, able)
        if why:
            refused[why] += len(divisors(rest))
            continue
        for pp in divisors(rest):
            why = able.why_not("divided", "pipeline") if pp > 1 else None
            if why or pp > max(1, len(profile.blocks)):
                refused[f"pipeline: {why}" if why else "pipeline: more stages than blocks"] += 1
                continue
            dp = rest // pp
            if global_batch % dp:
                refused["the data-parallel size does not divide the global batch"] += 1
                continue
            for layout in _of_sizes(profile, dp, tp, pp, global_batch // dp, refused, able):
                yield from _with_techniques(profile, layout, refused, able, fp8=fp8)


def _with_techniques(
    profile: ModuleProfile, layout: Layout, refused: Counter[str], able: Abilities, *, fp8: bool
) -> Iterator[Layout]:
    """Yield the layout with every possible set of techniques."""
    kinds = [layout]
    if profile.blocks:
        kinds += _rematerialized(layout, refused, able)
    if layout.plain and not able.why_not("ActivationCompression") and not able.must_fp8:
        kinds += [replace(layout, bits=bits) for bits in BITS]
    if layout.plain and not able.why_not("OptimizerOffload") and profile.state_bytes:
        kinds += [replace(kind, offload=True) for kind in kinds]
    for kind in kinds:
        yield kind
        # ActivationCompression does not compress the tensors that FP8 saves
        if fp8 and not profile.precision.fp8 and kind.bits == 32 and not able.why_not("fp8") and profile.fp8_share:
            yield replace(kind, fp8=True)


def _rematerialized(layout: Layout, refused: Counter[str], able: Abilities) -> list[Layout]:
    """Return the layout with each policy of Rematerialization that supports it."""
    if able.why_not("Rematerialization"):
        return []
    if layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward:
        # selective checkpoints cannot run half a backward pass; others keep the recomputed tensors between both halves
        refused["remat: the schedule splits the backward pass"] += len(REMAT) - 1
        return []
    found = [replace(layout, remat=remat) for remat in ("selective", "full")]
    if layout.pp > 1:
        refused["remat sqrt and optimal: not available in a pipeline"] += 2
        return found
    found.append(replace(layout, remat="sqrt"))
    if layout.shard != "none":
        refused["remat optimal: not available with sharded parameters"] += 1
        return found
    return found + [replace(layout, remat="optimal", budget=budget) for budget in BUDGETS]


def _tensor_refusal(profile: ModuleProfile, tp: int, node_size: int, able: Abilities) -> str | None:
    if tp == 1:
        return None
    why = able.why_not("divided", "tensor")
    if why:
        return f"tensor parallelism: {why}"
    if not profile.blocks:
        return "tensor parallelism: the module has no stack of blocks"
    if tp > node_size:
        return "tensor parallelism: more ranks than accelerators in a node"
    if any(width % tp for width in profile.widths):
        return "tensor parallelism: its size does not divide the heads or widths"
    return None


def _of_sizes(
    profile: ModuleProfile, dp: int, tp: int, pp: int, samples: int, refused: Counter[str], able: Abilities
) -> Iterator[Layout]:
    for micro_batch in divisors(samples):
        m = samples // micro_batch
        if able.batch is not None and able.batch != (micro_batch if pp == 1 else samples):
            refused["micro-batch: the config has no batch size that the plan can change"] += 1
            continue
        for name, v in _pipelines(profile, pp):
            why = SCHEDULES[name].refusal(pp, v, m) if pp > 1 else None
            if why:
                refused[f"schedule: {why}"] += 1
                continue
            schedule = name if pp > 1 else "none"
            for shard, shards in _shardings(dp, schedule, refused, able):
                yield Layout(dp, tp, pp, shard, schedule, v, micro_batch, m, "none", shards)


def _shardings(dp: int, schedule: str, refused: Counter[str], able: Abilities) -> Iterator[tuple[str, int]]:
    """Yield the ways to hold parameters on ``dp`` data ranks: whole, sharded over all ranks, or sharded in groups."""
    yield "none", 0
    if dp == 1:
        return
    why = able.why_not("divided", "shard")
    if why:
        refused[f"sharding: {why}"] += 1
        return
    # with a split backward pass FSDP2 must not reshard: the gradients would be wrong
    shard = "zero2" if schedule != "none" and SCHEDULES[schedule].splits_backward else "zero3"
    yield shard, 0
    for shards in divisors(dp)[1:-1]:
        yield shard, shards


def _pipelines(profile: ModuleProfile, pp: int) -> list[tuple[str, int]]:
    """Return each schedule and number of stages per rank for which every stage has a block."""
    if pp == 1:
        return [("1F1B", 1)]
    found: list[tuple[str, int]] = []
    for name, schedule in SCHEDULES.items():
        if schedule.v_shaped:
            counts: tuple[int, ...] = (2,)
        elif schedule.interleaved:
            counts = (1, *_STAGES) if schedule.splits_backward else _STAGES
        else:
            counts = (1,)
        found += [(name, v) for v in counts if pp * v <= len(profile.blocks)]
    return found


def split_blocks(weights: list[float], before: float, after: float, stages: int) -> list[range]:
    """Cut the stack into ``stages`` parts of at least one block so that the heaviest part is as light as possible.

    Args:
        weights: weight of each block.
        before: additional weight of the first stage.
        after: additional weight of the last stage.
        stages: number of stages, at most ``len(weights)``.
    """
    if not weights:
        return [range(0)] * stages
    low, high = max(weights), sum(weights) + before + after
    best = _cut(weights, before, after, stages, high)
    for _ in range(40):
        middle = (low + high) / 2
        cut = _cut(weights, before, after, stages, middle)
        if cut is None:
            low = middle
        else:
            best, high = cut, middle
    assert best is not None  # one stage may hold everything
    return best


def _cut(weights: list[float], before: float, after: float, stages: int, limit: float) -> list[range] | None:
    """Cut greedily from the end, so that the first stages, which hold the most micro-batches, get fewer blocks."""
    cuts: list[range] = []
    end = len(weights)
    for stage in reversed(range(stages)):
        start, load = end - 1, weights[end - 1] + (after if stage == stages - 1 else 0.0)
        extra = before if stage == 0 else 0.0
        while start > stage and load + weights[start - 1] + extra <= limit * (1 + 1e-12):
            start -= 1
            load += weights[start]
        if stage == 0:
            start, load = 0, sum(weights[:end]) + before + (after if stages == 1 else 0.0)
        if load > limit * (1 + 1e-12) and not (end - start == 1 and stage > 0):
            return None
        cuts.append(range(start, end))
        end = start
    return cuts[::-1]
