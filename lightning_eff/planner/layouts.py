"""Layouts: how so many accelerators share a module's training, and which of them can be had at all."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_eff.planner.profiling import ModuleProfile
from lightning_eff.planner.schedules import SCHEDULES

#: What becomes of activations: all kept; results of linear layers and fused attention kept and the rest computed again;
#: only each block's input kept.
REMAT = ("none", "selective", "full")
#: Data parallelism: whole copies (DDP); FSDP2 with ``reshard_after_forward=False``, weights gathered and gradients reduced
#: once a step; FSDP2 with resharding, both once a micro-batch.
SHARD = ("none", "zero2", "zero3")
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
    profile: ModuleProfile, gpus: int, node_size: int, global_batch: int, refused: Counter[str]
) -> Iterator[Layout]:
    """Every layout of ``gpus`` accelerators that can be had.

    Args:
        profile: of the module.
        gpus: accelerators in all.
        node_size: of them in a node; tensor parallelism stays within one.
        global_batch: samples of a step.
        refused: how often each reason ruled out a combination is added here.
    """
    for tp in divisors(gpus):
        rest = gpus // tp
        why = _tensor_refusal(profile, tp, node_size)
        if why:
            refused[why] += len(divisors(rest))
            continue
        for pp in divisors(rest):
            if pp > max(1, len(profile.blocks)):
                refused["pipeline deeper than the stack of blocks"] += 1
                continue
            dp = rest // pp
            if global_batch % dp:
                refused["global batch does not divide by the data-parallel size"] += 1
                continue
            yield from _of_sizes(profile, dp, tp, pp, global_batch // dp, refused)


def _tensor_refusal(profile: ModuleProfile, tp: int, node_size: int) -> str | None:
    if tp == 1:
        return None
    if not profile.blocks:
        return "no stack of blocks: data parallelism only"
    if tp > node_size:
        return "tensor parallelism beyond a node"
    if any(width % tp for width in profile.widths):
        return "tensor parallel size does not divide the heads or widths"
    return None


def _of_sizes(
    profile: ModuleProfile, dp: int, tp: int, pp: int, samples: int, refused: Counter[str]
) -> Iterator[Layout]:
    shards = SHARD if dp > 1 else SHARD[:1]
    remats = REMAT if profile.blocks else REMAT[:1]
    for micro_batch in divisors(samples):
        m = samples // micro_batch
        for name, v in _pipelines(profile, pp):
            why = SCHEDULES[name].refusal(pp, v, m) if pp > 1 else None
            if why:
                refused[f"schedule: {why}"] += len(shards) * len(remats)
                continue
            for shard in shards:
                if shard == "zero3" and pp > 1 and SCHEDULES[name].splits_backward:
                    refused["resharding after forward with a backward pass in two halves trains wrongly"] += len(remats)
                    continue
                for remat in remats:
                    yield Layout(dp, tp, pp, shard, name if pp > 1 else "none", v, micro_batch, m, remat)


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
