"""Runs whole batches through the stages, one after the other, for the checks at setup and to find shapes."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_eff.strategies._pipeline.layout import Layout
from lightning_eff.strategies._pipeline.runner import left
from lightning_eff.strategies._pipeline.shared_state import Step
from lightning_eff.strategies._pipeline.stack import Like, Stack
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Pass


@dataclass
class Through:
    """The results of a batch's way through the stages.

    Attributes:
        output: result of the step on the last stage, if it ran here.
        hidden: the hidden state that left each stage here.
        received: the hidden state that entered each stage here, if it needs a gradient.
        passes: the runs of the stages, for recomputation, if gradients are needed.
        likes: shape and type of the hidden states.
    """

    output: Any = None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[int, Pass] = field(default_factory=dict)
    likes: dict[int, Like] = field(default_factory=dict)


def through(
    stack: Stack,
    where: Layout,
    step: Step,
    batch: Any,
    stream: Stream,
    *,
    group: ProcessGroup | None,
    device: torch.device,
    taint: bool = False,
    grad: bool = False,
    around: Callable[[int], Any] = lambda stage: nullcontext(),
) -> Through:
    """Run the step on a batch, stage after stage.

    Args:
        group: the pipeline ranks, which run their own stages; None runs all stages in this process.
        taint: whether skipped blocks return NaN.
        grad: whether received hidden states need gradients.
        around: returns a context for each stage here.
    """
    me = None if group is None else dist.get_rank(group)
    found = Through()
    for stage, (first, end) in enumerate(where.bounds):
        if me is not None and where.ranks[stage] != me:
            continue
        received = None
        if stage > 0:
            if me is None or where.ranks[stage - 1] == me:
                received = found.hidden[stage - 1]
            else:
                assert group is not None
                received = _receive(stack, where.ranks[stage - 1], group, device)
            received = received.detach()
            found.likes[stage - 1] = (tuple(received.shape), received.dtype)
            if grad:
                received = found.received[stage] = received.clone().requires_grad_()
        run = Pass(stack, first, end, stream, received, training=grad, taint=taint, learn=True)
        if grad:
            found.passes[stage] = run
        with around(stage):
            output, exited = left(run, step, batch)
        if not exited:
            found.output = output
            continue
        found.hidden[stage] = output
        found.likes[stage] = (tuple(output.shape), output.dtype)
        if me is not None and where.ranks[stage + 1] != me:
            assert group is not None
            _send(stack, output.detach(), where.ranks[stage + 1], group, device)
    return found


def _send(stack: Stack, hidden: Tensor, to: int, group: ProcessGroup, device: torch.device) -> None:
    told = [tuple(hidden.shape), hidden.dtype, stack.form, stack.slot]
    dist.send_object_list(told, group_dst=to, group=group, device=device)
    dist.send(hidden.contiguous(), group_dst=to, group=group)


def _receive(stack: Stack, source: int, group: ProcessGroup, device: torch.device) -> Tensor:
    told: list[Any] = [None] * 4
    dist.recv_object_list(told, group_src=source, group=group, device=device)
    shape, dtype, form, slot = told
    stack.form, stack.slot = stack.form or form, slot if stack.slot is None else stack.slot
    hidden = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(hidden, group_src=source, group=group)
    return hidden
