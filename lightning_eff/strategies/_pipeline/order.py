"""The order of each rank's operations in PyTorch's pipeline schedules, without a process group."""

import functools
from types import SimpleNamespace
from typing import Any, cast

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

SCHEDULES = {
    "GPipe": torch_schedules.ScheduleGPipe,
    "1F1B": torch_schedules.Schedule1F1B,
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "LoopedBFS": torch_schedules.ScheduleLoopedBFS,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}
ONE_STAGE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

Operation = tuple[int, str, int]


def schedule_name(schedule: str, *, who: str) -> str:
    """Return the schedule's name in PyTorch's spelling, ignoring case.

    Raises:
        ValueError: if there is no such schedule.
    """
    for name in SCHEDULES:
        if schedule.lower() == name.lower():
            return name
    raise ValueError(f"{who}(schedule={schedule!r}): there is no such schedule. Use one of {', '.join(SCHEDULES)}.")


def stage_ranks(schedule: str, num_ranks: int, num_stages: int) -> list[int]:
    """Return the pipeline rank of each stage: in loops, or in a V (Qi et al. 2024, arXiv:2401.10241, section 6)."""
    mapping = generate_stage_to_rank_mapping(num_ranks, num_stages, "v" if schedule in V_SHAPED else "loop")
    return [mapping[stage] for stage in range(num_stages)]


def _actions(schedule: str, num_ranks: int, num_stages: int, num_microbatches: int) -> dict[int, list[Any]]:
    """Return PyTorch's list of actions for each rank; None is an idle slot."""
    local = [s for s, rank in enumerate(stage_ranks(schedule, num_ranks, num_stages)) if rank == 0]
    stages = [
        SimpleNamespace(
            stage_index=s,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            is_first=s == 0,
            is_last=s == num_stages - 1,
            submod=nn.Identity(),
            stage_index_to_group_rank={},
        )
        for s in local
    ]
    cls = cast("Any", SCHEDULES[schedule])
    built = cls(stages[0] if schedule in ONE_STAGE else stages, num_microbatches)
    return cast("dict[int, list[Any]]", built.pipeline_order)


@functools.lru_cache(maxsize=256)
def refusal(schedule: str, num_ranks: int, num_stages: int, num_microbatches: int) -> str | None:
    """Return PyTorch's reason why the schedule cannot run this number of micro-batches, or None."""
    if num_microbatches < 1:
        return f"Got {num_microbatches} micro-batches."
    try:
        _actions(schedule, num_ranks, num_stages, num_microbatches)
    except (ValueError, AssertionError, RuntimeError, IndexError, KeyError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _one_stage(schedule: str, rank: int, num_ranks: int, num_microbatches: int) -> list[Operation]:
    """Return the operations in the order in which ``ScheduleGPipe`` and ``Schedule1F1B`` run them; their lists differ."""
    warmup = num_microbatches if schedule == "GPipe" else min(num_microbatches, num_ranks - rank)
    ordered: list[Operation] = [(rank, "F", mb) for mb in range(warmup)]
    for mb in range(num_microbatches):
        ordered.append((rank, "B", mb))
        if warmup + mb < num_microbatches:
            ordered.append((rank, "F", warmup + mb))
    return ordered


def operations(schedule: str, num_ranks: int, num_stages: int, num_microbatches: int) -> list[list[Operation]]:
    """Return the operations of each rank in order, without idle slots.

    Args:
        schedule: one of :data:`SCHEDULES`.
        num_ranks: pipeline ranks, >= 1.
        num_stages: stages over all ranks, a multiple of ``num_ranks``.
        num_microbatches: >= 1.

    Returns:
        For each rank a list of ``(stage, operation, micro-batch)``. The operation is ``"F"`` (forward), ``"B"`` (whole
        backward), ``"I"`` (backward for the inputs) or ``"W"`` (backward for the weights). Overlapped operations follow each
        other, as PyTorch runs them.

    Raises:
        ValueError: if the schedule cannot run this number of micro-batches and stages.
    """
    reason = refusal(schedule, num_ranks, num_stages, num_microbatches)
    if reason is not None:
        raise ValueError(
            f"{schedule}: got {num_microbatches} micro-batches for {num_stages} stages on {num_ranks} ranks; {reason}"
        )
    if schedule in ONE_STAGE:
        return [_one_stage(schedule, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    actions = _actions(schedule, num_ranks, num_stages, num_microbatches)
    ordered: list[list[Operation]] = []
    for rank in range(num_ranks):
        flat = [a for action in actions[rank] if action is not None for a in (action.sub_actions or (action,))]
        ordered.append(
            [
                (a.stage_index, a.computation_type.value, a.microbatch_index)
                for a in flat
                if a.computation_type.value in ("F", "B", "I", "W")
            ]
        )
    return ordered
