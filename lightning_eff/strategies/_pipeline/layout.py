"""Assigns blocks to stages and stages to ranks, and chooses the number of micro-batches."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_eff.strategies._pipeline.order import ONE_STAGE, V_SHAPED, refusal, stage_ranks

_FOR_FEW = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}


def balanced(costs: Sequence[float], num_stages: int, last: float = 0.0) -> list[int]:
    """Split blocks into contiguous stages with the lowest maximum cost.

    Args:
        costs: cost of each block, >= 0.
        num_stages: 1 to ``len(costs)``; every stage gets at least one block.
        last: additional cost of the last stage (the head).

    Returns:
        The number of blocks of each stage. If several splits have the same maximum, this is the most even one, with the
        smallest sum of squares.
    """
    dearest, _ = _partition(costs, num_stages, last, lambda so_far, cost: max(so_far, cost))
    # a second search by squares, since a search over pairs (maximum, squares) fails: a worse beginning can end better

    def squares(so_far: float, cost: float) -> float:
        return so_far + cost * cost if cost <= dearest else math.inf

    return _partition(costs, num_stages, last, squares)[1]


def _partition(
    costs: Sequence[float], num_stages: int, last: float, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the contiguous split with the smallest total; ``join`` adds a stage's cost to the total."""
    sums = [0.0, *itertools.accumulate(costs)]
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, num_stages + 1):
        extra = last if stage == num_stages else 0.0
        best = {
            end: min(
                (join(best[start][0], sums[end] - sums[start] + extra), [*best[start][1], end - start])
                for start in range(stage - 1, end)
                if start in best
            )
            for end in range(stage, len(costs) + 1)
        }
    return best[len(costs)]


def block_costs(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[float], float]:
    """Return the cost of each block, and of the parts outside that only the last stage computes.

    A block's cost is its number of parameters, which is proportional to the operations of its matrix products. Outside the
    blocks only linear layers count (the head). Embeddings cost nothing.
    """
    inside = {id(m) for block in blocks for m in block.modules()}
    costs = [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    head = [m for m in module.modules() if id(m) not in inside and isinstance(m, nn.Linear)]
    outside = {id(m.weight): float(m.weight.numel()) for m in head}
    return costs, sum(outside.values())


@dataclass(frozen=True)
class Layout:
    """The assignment of blocks to stages and ranks.

    Attributes:
        bounds: first block of each stage, and the block after its last.
        ranks: pipeline rank of each stage.
    """

    schedule: str
    num_ranks: int
    bounds: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.bounds)

    @property
    def num_blocks(self) -> int:
        return self.bounds[-1][1]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def stage_of(self, block: int) -> int:
        """Return the stage that owns a block."""
        return next(s for s, (first, end) in enumerate(self.bounds) if first <= block < end)

    @property
    def last_rank(self) -> int:
        """The pipeline rank that computes head and loss."""
        return self.ranks[-1]

    def __str__(self) -> str:
        return "; ".join(
            f"stage {s} (pipeline rank {self.ranks[s]}): blocks {first} to {end - 1}"
            for s, (first, end) in enumerate(self.bounds)
        )


def layout(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    schedule: str,
    num_ranks: int,
    split: str | Sequence[int],
    path: str,
    who: str,
) -> Layout:
    """Assign the blocks to stages and pipeline ranks.

    Schedules with one stage per rank (GPipe, 1F1B) have as many stages as ranks. Others have two per rank, or as many as
    ``split`` has.

    Args:
        module: the module.
        blocks: its blocks.
        schedule: name of the schedule.
        num_ranks: number of pipeline ranks.
        split: "balanced", or the number of blocks of each stage.
        path: path of the stack in messages.
        who: name of the caller in messages.

    Raises:
        ValueError: if there are fewer blocks than stages, or if the split does not fit.
    """
    per_rank = 1 if schedule in ONE_STAGE else 2
    depth = f"{len(blocks)} blocks in {path!r}"
    if isinstance(split, str):
        if split != "balanced":
            raise ValueError(
                f"{who}(pipeline_split={split!r}): expected 'balanced' or the number of blocks of each stage, such as"
                f" {[len(blocks) // num_ranks] * num_ranks}."
            )
        num_stages = per_rank * num_ranks
        if num_stages > len(blocks):
            deeper = f"schedule={schedule!r} has {per_rank} stages on each of {num_ranks} pipeline ranks"
            raise ValueError(
                f"{who}(pipeline_parallel_size={num_ranks}): got {num_stages} stages ({deeper}) for {depth}; expected at"
                f" most {len(blocks)} stages, since each needs a block. Use a smaller pipeline_parallel_size"
                f"{', a schedule with one stage per rank (1F1B, GPipe)' if per_rank > 1 else ''} or a deeper model."
            )
        costs, last = block_costs(module, blocks)
        sizes = balanced(costs, num_stages, last)
    else:
        sizes = list(split)
        wanted = f"{num_ranks}" if per_rank == 1 else f"{2 * num_ranks}"
        whole = all(isinstance(size, int) and size >= 1 for size in sizes)
        fits = len(sizes) == int(wanted) or (
            schedule not in (*ONE_STAGE, *V_SHAPED) and sizes and len(sizes) % num_ranks == 0
        )
        if not whole or not fits or sum(sizes) != len(blocks):
            raise ValueError(
                f"{who}(pipeline_split={sizes}): got {len(sizes)} stages with {sum(s for s in sizes if isinstance(s, int))}"
                f" blocks in all; expected {wanted} numbers >= 1 (schedule={schedule!r}, {num_ranks} pipeline ranks) with"
                f" the sum {len(blocks)}, for the {depth}. Correct the numbers or use 'balanced'."
            )
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return Layout(schedule, num_ranks, bounds, tuple(stage_ranks(schedule, num_ranks, len(sizes))))


def check_num_microbatches(number: int | None, where: Layout, *, who: str) -> None:
    """Raise ``ValueError`` if the schedule cannot run that many micro-batches; None is decided for each batch."""
    if number is None:
        return
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{who}(num_microbatches={number!r}): expected an integer >= 1, or None to choose one.")
    reason = refusal(where.schedule, where.num_ranks, where.num_stages, number)
    if reason is not None:
        fits = [n for n in range(1, 8 * where.num_stages + 1) if _runs(where, n)]
        raise ValueError(
            f"{who}(num_microbatches={number}, schedule={where.schedule!r}): {reason} Expected a number that the schedule"
            f" can run on {where.num_stages} stages, such as {fits[:6]}; or None to choose one for each batch."
        )


def _runs(where: Layout, number: int, schedule: str | None = None) -> bool:
    return refusal(schedule or where.schedule, where.num_ranks, where.num_stages, number) is None


def num_microbatches(
    batch_size: int, given: int | None, where: Layout, *, most: int | None, who: str
) -> tuple[int, str]:
    """Return the number of micro-batches for a batch of ``batch_size`` samples, and the schedule that runs them.

    A given number must divide the batch. A batch smaller than the largest one so far, such as an epoch's last, can be
    indivisible. It is then split into the largest smaller number of equal parts, so that the mean over micro-batches is the
    mean over the batch. If 1F1B or DualPipeV cannot run so few, GPipe or ZBVZeroBubble runs them, which have the same stages
    and results.

    Without a given number, it is the largest number up to twice the stages that divides the batch and that the schedule can
    run. If there is none, it is the smallest number above.

    Args:
        batch_size: samples in this batch, >= 1.
        given: ``num_microbatches`` of the strategy.
        where: the layout.
        most: samples in the largest batch so far, or None for the first batch.
        who: name of the caller in messages.

    Raises:
        ValueError: if there is no such number.
    """
    if given is not None and batch_size % given == 0:
        return given, where.schedule
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    fits = [n for n in divisors if _runs(where, n)]
    smaller = most is not None and batch_size < most
    limit = 2 * where.num_stages if given is None else given
    below = [n for n in fits if n <= limit]
    if below and (given is None or smaller):
        return below[-1], where.schedule
    if fits and given is None:
        return fits[0], where.schedule
    instead = _FOR_FEW.get(where.schedule)
    if smaller and instead is not None:
        return next(n for n in reversed(divisors) if n <= limit and _runs(where, n, instead)), instead
    ways = f"use num_microbatches from {fits}" if fits else "use a larger batch"
    sizes = (
        f"a batch of {batch_size} samples for {given} micro-batches: {batch_size} / {given} = {batch_size / given:.2f}"
        if given is not None
        else f"a batch of {batch_size} samples for schedule={where.schedule!r} on {where.num_stages} stages"
    )
    raise ValueError(
        f"{who}(num_microbatches={given}): got {sizes}; expected equal micro-batches that the schedule can run. Set the"
        f" loader's batch size on each data-parallel rank to a multiple of {given or where.num_stages}, {ways}, or set"
        " drop_last=True on the loader if this is its last batch."
    )
