"""The state that all stages of a pipeline share: the module, the progress of passes, and the running pass."""

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
    """The module of a pipeline and its layout.

    Attributes:
        module: the module with all blocks, or with those of this rank.
        stack: the blocks.
        layout: the assignment of blocks to stages and ranks.
        group: the pipeline ranks.
        device: device of the blocks and messages.
        who: name of the caller in messages.
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
        scale: factor of the batch's loss before the backward passes.
        weights: weights of the micro-batches' losses, with sum 1; None if they are equal.
        likes: shapes and types of the hidden state between stages ``s`` and ``s + 1``, and of what goes with it.
        passes: runs by stage and micro-batch that still need their backward pass.
    """

    step: Step
    microbatches: list[Any]
    number: int
    scale: Any
    weights: list[float] | None
    likes: dict[int, tuple[Like, ...]]
    recorders: Recorders
    losses: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[tuple[int, int], Pass] = field(default_factory=dict)
    failure: BaseException | None = None

    def factor(self, microbatch: int) -> Any:
        """Return the factor of that micro-batch's loss."""
        return self.scale * (1 / len(self.microbatches) if self.weights is None else self.weights[microbatch])


@dataclass
class Course:
    """The progress of passes.

    Attributes:
        seed: seed of all random numbers in steps.
        passes: number of training passes so far.
        evaluations: number of evaluation passes so far.
        most: samples in the largest training batch so far, 0 before the first.
        running: the running training pass.
        part: index of the running micro-batch, and the number of micro-batches.
    """

    seed: int
    passes: int = 0
    evaluations: int = 0
    most: int = 0
    running: Running | None = None
    part: tuple[int, int] = (0, 1)


class OuterParameters:
    """A rank's parameters outside its blocks, looked up at each use because sharding replaces them.

    Args:
        module: the module with all blocks, or with those of this rank.
        blocks: this rank's blocks.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._module, self._blocks = module, blocks

    def __iter__(self) -> Iterator[nn.Parameter]:
        inside = {id(p) for block in self._blocks for p in block.parameters()}
        yield from (p for p in self._module.parameters() if id(p) not in inside)


class OuterBuffers:
    """Buffers outside the blocks on a rank with several stages, with separate values for each stage.

    The code outside the blocks runs once per stage. With shared buffers, a BatchNorm before the stack would count every
    micro-batch twice. Outside training passes the module has the buffers of the rank's last stage.
    """

    def __init__(self, module: nn.Module, blocks: list[nn.Module], stages: list[int]) -> None:
        inside = {id(m) for block in blocks for m in block.modules()}
        self._owners = [m for m in module.modules() if id(m) not in inside and m._buffers]
        self._copies: dict[int, list[dict[str, Tensor | None]]] = {}
        self._stages = stages

    def put(self, stage: int) -> Callable[[], None]:
        """Put the buffers of ``stage`` into the module, and return a function that restores the module's."""
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
        """Start again from the module's buffers, after they were loaded or changed outside training passes."""
        self._copies.clear()
