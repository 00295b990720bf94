"""Torch's own pipeline schedules, built without processes on a fake process group, as lists of operations."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

Raw = list[tuple[str, int, int]]


def torch_lists(name: str, p: int, v: int, m: int, *, v_shaped: bool) -> list[Raw]:
    """What each rank does: of schedules with one stage a rank the run itself, of others the list that torch's runtime runs.

    (``pipeline_order`` of the former is a drawing: torch 2.13 numbers the last rank's forward passes of 1F1B from 1.)
    """
    cls: Any = torch_schedules.get_schedule_class(name)
    if issubclass(cls, torch_schedules.PipelineScheduleSingle):
        return [_run(cls, rank, p, m) for rank in range(p)]
    stages = [0, 2 * p - 1] if v_shaped else list(range(0, p * v, p))
    order = _built(cls, 0, p, stages, p * v, m).pipeline_order
    return [_flat(order[rank]) for rank in range(p)]


def _built(cls: Any, rank: int, p: int, stages: list[int], num_stages: int, m: int) -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=p)
    try:
        like = torch.zeros(1, requires_grad=True)
        made = [
            PipelineStage(nn.Linear(1, 1), s, num_stages, torch.device("cpu"), input_args=(like,), output_args=(like,))
            for s in stages
        ]
        several = issubclass(cls, torch_schedules.PipelineScheduleMulti)
        return cls(made if several else made[0], m, loss_fn=lambda output, target: output.sum())
    finally:
        dist.destroy_process_group()


def _flat(actions: list[Any]) -> Raw:
    ops: Raw = []
    for action in actions:
        for part in () if action is None else action.sub_actions or (action,):
            if part.computation_type.value in "FBIW":
                ops.append((part.computation_type.value, part.stage_index, part.microbatch_index))
    return ops


class _Recorder:
    """In the place of a stage: notes what the schedule's loop asks for."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.ops: Raw = []
        self.stage_index, self.num_stages = stage, num_stages
        self.is_first, self.is_last, self.has_backward = stage == 0, stage == num_stages - 1, True
        self.submod = nn.Identity()

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.ops.append(("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.ops.append(("B", self.stage_index, microbatch))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: []


def _run(cls: Any, rank: int, p: int, m: int) -> Raw:
    schedule = _built(cls, rank, p, [rank], p, m)
    schedule._stage = stage = _Recorder(rank, p)
    for name in (
        "_initialize_stage",
        "_initialize_pp_stages",
        "_maybe_compute_loss",
        "_maybe_get_loss",
        "_update_losses",
    ):
        setattr(schedule, name, lambda *args, **kwargs: None)
    schedule._stage_initialized = schedule._stage_forward_initialized = schedule._stages_forward_initialized = True
    schedule._step_microbatches([()] * m, [{}] * m)
    return stage.ops
