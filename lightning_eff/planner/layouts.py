"""Layouts: how so many accelerators share a module's training, and which of them can be had at all."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_eff.planner._launch.abilities import Abilities
from lightning_eff.planner.profiling import ModuleProfile
from lightning_eff.planner.schedules import SCHEDULES

#: What becomes of activations, by Rematerialization's names: all kept; results of linear layers and fused attention kept
#: and the rest computed again; only the inputs of about sqrt(n) segments kept; only each block's input kept; as many blocks
#: kept as a budget allows.
REMAT = ("none", "selective", "full", "sqrt", "optimal")
#: Data parallelism: whole copies; FSDP2 with ``reshard_after_forward=False``, weights gathered and gradients reduced once a
#: step; FSDP2 with resharding, both once a micro-batch, or under a pipeline weights for each forward pass, gradients once.
SHARD = ("none", "zero2", "zero3")
#: The shares of what all blocks keep that are tried as ``memory_budget`` of Rematerialization(policy="optimal").
BUDGETS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
#: Bits of ActivationCompression that are tried.
BITS = (8, 4)
_STAGES = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Layout:
    """One way to share the work.

    Attributes:
        dp: replicas, or shards, of the data.
        tp: tensor parallel size.
        pp: ranks of the pipeline.
        shard: one of :data:`SHARD`.
        schedule: torch's name of the pipeline schedule; "none" without a pipeline.
        stages_per_rank: of the pipeline.
        micro_batch: samples that pass at once through one replica.
        num_microbatches: a step of one replica.
        remat: one of :data:`REMAT`.
        shards: data ranks that share one copy of the parameters, where it is not all of them (HSDP); 0 is all.
        budget: of "optimal".
        fp8: the blocks' linear layers multiply in FP8.
        bits: of saved activations; 32 leaves them.
        offload: the optimizer's states and its step are on the host.
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
        """Data ranks over which parameters are divided; 1 where they are whole."""
        return 1 if self.shard == "none" else self.shards or self.dp

    @property
    def plain(self) -> bool:
        """Whether each process holds the whole module: DDP or a single device will do."""
        return self.shard == "none" and self.tp == self.pp == 1

    @property
    def num_stages(self) -> int:
        """Of the pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def gpus(self) -> int:
        """Accelerators in all."""
        return self.dp * self.tp * self.pp

    @property
    def simulated_schedule(self) -> str:
        """The schedule to simulate: without a pipeline micro-batches go forward and backward one by one, as in 1F1B."""
        return "1F1B" if self.pp == 1 else self.schedule


def divisors(n: int) -> list[int]:
    """In rising order."""
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
    """Every layout of ``gpus`` accelerators that can be had.

    Args:
        profile: of the module.
        gpus: accelerators in all.
        node_size: of them in a node; tensor parallelism stays within one.
        global_batch: samples of a step.
        refused: how often each reason ruled out a combination is added here.
        able: what the recipe allows; everything if None.
        fp8: the accelerator has it.
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
                refused[f"pipeline: {why}" if why else "pipeline deeper than the stack of blocks"] += 1
                continue
            dp = rest // pp
            if global_batch % dp:
                refused["global batch does not divide by the data-parallel size"] += 1
                continue
            for layout in _of_sizes(profile, dp, tp, pp, global_batch // dp, refused, able):
                yield from _with_techniques(profile, layout, refused, able, fp8=fp8)


def _with_techniques(
    profile: ModuleProfile, layout: Layout, refused: Counter[str], able: Abilities, *, fp8: bool
) -> Iterator[Layout]:
    """The layout with every set of techniques that goes with it."""
    kinds = [layout]
    if profile.blocks:
        kinds += _rematerialized(layout, refused, able)
    if layout.plain and not able.why_not("ActivationCompression") and not able.must_fp8:
        kinds += [replace(layout, bits=bits) for bits in BITS]
    if layout.plain and not able.why_not("OptimizerOffload") and profile.state_bytes:
        kinds += [replace(kind, offload=True) for kind in kinds]
    for kind in kinds:
        yield kind
        # what FP8 saves for its backward pass is not compressed
        if fp8 and not profile.precision.fp8 and kind.bits == 32 and not able.why_not("fp8") and profile.fp8_share:
            yield replace(kind, fp8=True)


def _rematerialized(layout: Layout, refused: Counter[str], able: Abilities) -> list[Layout]:
    """With the policies of Rematerialization that run in this layout."""
    if able.why_not("Rematerialization"):
        return []
    if layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward:
        # selective checkpoints cannot be run for half a backward pass, and the others keep what they ran again between both
        refused["rematerialization with a backward pass in two halves"] += len(REMAT) - 1
        return []
    found = [replace(layout, remat=remat) for remat in ("selective", "full")]
    if layout.pp > 1:
        refused["remat sqrt or optimal in a pipeline, whose stages hold parts of the stack"] += 2
        return found
    found.append(replace(layout, remat="sqrt"))
    if layout.shard != "none":
        refused["remat optimal where parameters are sharded: it measures whole blocks"] += 1
        return found
    return found + [replace(layout, remat="optimal", budget=budget) for budget in BUDGETS]


def _tensor_refusal(profile: ModuleProfile, tp: int, node_size: int, able: Abilities) -> str | None:
    if tp == 1:
        return None
    why = able.why_not("divided", "tensor")
    if why:
        return f"tensor parallelism: {why}"
    if not profile.blocks:
        return "no stack of blocks: data parallelism only"
    if tp > node_size:
        return "tensor parallelism beyond a node"
    if any(width % tp for width in profile.widths):
        return "tensor parallel size does not divide the heads or widths"
    return None


def _of_sizes(
    profile: ModuleProfile, dp: int, tp: int, pp: int, samples: int, refused: Counter[str], able: Abilities
) -> Iterator[Layout]:
    for micro_batch in divisors(samples):
        m = samples // micro_batch
        if able.batch is not None and able.batch != (micro_batch if pp == 1 else samples):
            refused["the loader's batch size is the recipe's own, and not known to the plan"] += 1
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
    """Ways to hold parameters on ``dp`` data ranks: whole, in pieces over all of them, or over groups."""
    yield "none", 0
    if dp == 1:
        return
    why = able.why_not("divided", "shard")
    if why:
        refused[f"sharding: {why}"] += 1
        return
    # FSDP2 under a backward pass in two halves does not reshard: it would train wrongly
    shard = "zero2" if schedule != "none" and SCHEDULES[schedule].splits_backward else "zero3"
    yield shard, 0
    for shards in divisors(dp)[1:-1]:
        yield shard, shards


def _pipelines(profile: ModuleProfile, pp: int) -> list[tuple[str, int]]:
    """The schedules, with stages a rank, that have a block for each stage."""
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
    """Cut the stack into ``stages`` runs of blocks, the heaviest as light as possible, each with at least one block.

    Args:
        weights: of each block.
        before: weight that the first stage has beside its blocks.
        after: weight that the last stage has beside its blocks.
        stages: how many; at most ``len(weights)``.
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
    """Greedy from the end, so that the first stages, which hold the most micro-batches, are not the fullest."""
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
