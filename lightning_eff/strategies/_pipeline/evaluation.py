"""Runs whole batches through the stages, one after the other, for the checks at setup and to find shapes."""

from collections.abc import Callable, Sequence
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
from lightning_eff.strategies._side_outputs.places import Values, detached


@dataclass
class Through:
    """The results of a batch's way through the stages.

    Attributes:
        output: result of the step on the last stage, if it ran here.
        hidden: the hidden state that left each stage here.
        received: the hidden state that entered each stage here, if it needs a gradient.
        beside: what blocks had left next to their hidden states when each stage here was left, by block.
        passes: the runs of the stages, for recomputation, if gradients are needed.
        likes: shapes and types of the hidden states and of what goes with them.
    """

    output: Any = None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    beside: dict[int, dict[int, Values]] = field(default_factory=dict)
    passes: dict[int, Pass] = field(default_factory=dict)
    likes: dict[int, tuple[Like, ...]] = field(default_factory=dict)


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
    still: bool = False,
    around: Callable[[int], Any] = lambda stage: nullcontext(),
) -> Through:
    """Run the step on a batch, stage after stage.

    Args:
        group: the pipeline ranks, which run their own stages; None runs all stages in this process.
        taint: whether skipped blocks return NaN.
        grad: whether received tensors need gradients.
        still: whether blocks leave zeros next to their hidden states.
        around: returns a context for each stage here.
    """
    me = None if group is None else dist.get_rank(group)
    found = Through()
    for stage, (first, end) in enumerate(where.bounds):
        if me is not None and where.ranks[stage] != me:
            continue
        received, beside = None, {}
        if stage > 0:
            if me is None or where.ranks[stage - 1] == me:
                received, beside = found.hidden[stage - 1], found.beside[stage - 1]
            else:
                assert group is not None
                received, beside = _receive(stack, where.ranks[stage - 1], group, device)
            received = received.detach()
            beside = {index: detached(values) for index, values in beside.items()}
            found.likes[stage - 1] = likes_of(received, stack.beside.flat(beside, first))
            if grad:
                received = found.received[stage] = received.clone().requires_grad_()
                beside = {index: _leaves(values) for index, values in beside.items()}
        run = Pass(
            stack, first, end, stream, received, beside=beside, still=still, training=grad, taint=taint, learn=True
        )
        if grad:
            found.passes[stage] = run
        with around(stage):
            output, exited = left(run, step, batch)
        if not exited:
            found.output = output
            continue
        if grad:
            stack.beside.refuse_missing(run.beside, end)
        found.hidden[stage], found.beside[stage] = output, run.beside
        found.likes[stage] = likes_of(output, stack.beside.flat(run.beside, end))
        if me is not None and where.ranks[stage + 1] != me:
            assert group is not None
            _send(stack, output.detach(), run.beside, where.ranks[stage + 1], group, device)
    return found


def likes_of(hidden: Tensor, beside: Sequence[Tensor | None]) -> tuple[Like, ...]:
    """Return the shapes and types of a hidden state and of the tensors that go with it."""
    return tuple((tuple(value.shape), value.dtype) for value in (hidden, *beside) if value is not None)


def _leaves(values: Values) -> Values:
    return [None if value is None else value.clone().requires_grad_() for value in values]


def _send(
    stack: Stack, hidden: Tensor, beside: dict[int, Values], to: int, group: ProcessGroup, device: torch.device
) -> None:
    places = {index: stack.beside.places[index] for index in beside}
    sizes = {i: [None if t is None else (tuple(t.shape), t.dtype) for t in values] for i, values in beside.items()}
    told = [tuple(hidden.shape), hidden.dtype, stack.form, stack.slot, places, sizes]
    dist.send_object_list(told, group_dst=to, group=group, device=device)
    for value in (hidden.detach(), *(t.detach() for values in beside.values() for t in values if t is not None)):
        dist.send(value.contiguous(), group_dst=to, group=group)


def _receive(stack: Stack, source: int, group: ProcessGroup, device: torch.device) -> tuple[Tensor, dict[int, Values]]:
    told: list[Any] = [None] * 6
    dist.recv_object_list(told, group_src=source, group=group, device=device)
    shape, dtype, form, slot, places, sizes = told
    stack.form, stack.slot = stack.form or form, slot if stack.slot is None else stack.slot
    stack.beside.places.update(places)

    def received(like: Like | None) -> Tensor | None:
        if like is None:
            return None
        value = torch.empty(like[0], dtype=like[1], device=device)
        dist.recv(value, group_src=source, group=group)
        return value

    hidden = received((shape, dtype))
    assert hidden is not None
    return hidden, {index: [received(like) for like in likes] for index, likes in sizes.items()}
