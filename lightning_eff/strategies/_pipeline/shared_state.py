"""What all stages of one pipeline share: what they are cut from, how far its passes are, and the pass under way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_eff.strategies._pipeline.layout import Layout
from lightning_eff.strategies._pipeline.logging import Recorders
from lightning_eff.strategies._pipeline.stack import Like, Stack
from lightning_eff.strategies._pipeline.view import Pass

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Ground:
    """What the stages are cut from.

    Attributes:
        module: with all its blocks, or those of this rank.
        stack: the blocks.
        layout: which blocks and stages lie where.
        group: the pipeline ranks.
        device: of the blocks and of what is sent.
        who: for messages.
    """

    module: nn.Module
    stack: Stack
    layout: Layout
    group: ProcessGroup
    device: torch.device
    who: str


@dataclass
class Running:
    """One training pass.

    Attributes:
        scale: what the batch's loss is multiplied by before the backward passes.
        weights: of the micro-batches' losses in it, summing to 1; None if they are all the same.
        likes: shape and type of the hidden state between stages ``s`` and ``s + 1``.
        passes: by stage and micro-batch, those whose backward pass is still to come.
    """

    step: Step
    microbatches: list[Any]
    number: int
    scale: Any
    weights: list[float] | None
    likes: dict[int, Like]
    recorders: Recorders
    losses: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[tuple[int, int], Pass] = field(default_factory=dict)
    failure: BaseException | None = None

    def factor(self, microbatch: int) -> Any:
        """What that micro-batch's loss is multiplied by."""
        return self.scale * (1 / len(self.microbatches) if self.weights is None else self.weights[microbatch])


@dataclass
class Course:
    """How far the passes are.

    Attributes:
        seed: from which all random numbers of the steps follow.
        passes: training passes so far.
        evaluations: passes of evaluation so far.
        most: samples in the largest training batch so far; 0 before the first.
        running: the training pass under way.
        part: the index of the micro-batch that runs, or whose backward pass does, and how many there are.
    """

    seed: int
    passes: int = 0
    evaluations: int = 0
    most: int = 0
    running: Running | None = None
    part: tuple[int, int] = (0, 1)


class OuterParameters:
    """A rank's parameters outside its blocks, as they are when they are asked for: sharding puts others in their place.

    Args:
        module: with all its blocks, or those of this rank.
        blocks: this rank's.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._module, self._blocks = module, blocks

    def __iter__(self) -> Iterator[nn.Parameter]:
        inside = {id(p) for block in self._blocks for p in block.parameters()}
        yield from (p for p in self._module.parameters() if id(p) not in inside)


class OuterBuffers:
    """Buffers outside the blocks, for a rank of several stages: each stage's passes see and change its own.

    The code outside the blocks runs once for each stage, and would count every micro-batch twice (a BatchNorm before
    the stack). The buffers that are seen outside of training passes are those of the rank's last stage.
    """

    def __init__(self, module: nn.Module, blocks: list[nn.Module], stages: list[int]) -> None:
        inside = {id(m) for block in blocks for m in block.modules()}
        self._owners = [m for m in module.modules() if id(m) not in inside and m._buffers]
        self._copies: dict[int, list[dict[str, Tensor | None]]] = {}
        self._stages = stages

    def put(self, stage: int) -> Callable[[], None]:
        """Show ``stage`` its own buffers; returns what shows the module's again."""
        if len(self._stages) < 2 or stage == self._stages[-1] or not self._owners:
            return lambda: None
        if stage not in self._copies:
            self._copies[stage] = [
                {name: None if b is None else b.detach().clone() for name, b in m._buffers.items()}
                for m in self._owners
            ]
        before = [m._buffers for m in self._owners]
        for m, buffers in zip(self._owners, self._copies[stage], strict=True):
            m._buffers = buffers

        def put_back() -> None:
            for m, buffers in zip(self._owners, before, strict=True):
                m._buffers = buffers

        return put_back

    def forget(self) -> None:
        """Begin anew from the module's buffers (they were loaded, or changed outside of training passes)."""
        self._copies.clear()
