"""The record of a block's call that allows it to run again: its arguments, its context, and its saved tensors."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from lightning_eff.memory._hosting.host import Ticket
from lightning_eff.memory._planning.chain import Segment
from lightning_eff.memory._recompute.execution_context import Buffers, Surroundings

Run = Callable[..., Any]


def detached(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    """Return ``tensor`` without its graph, with the attributes that were set on it."""
    found = tensor.detach()
    vars(found).update((name, value) for name, value in vars(tensor).items() if name not in vars(found))
    found.requires_grad = requires_grad  # a tensor subclass may override the method
    return found


class Kept:
    """A stored tensor argument, without its graph."""

    __slots__ = ("requires_grad", "value", "version")

    def __init__(self, value: Tensor, requires_grad: bool) -> None:
        self.value, self.requires_grad, self.version = detached(value), requires_grad, value._version


class Away:
    """A tensor argument in host memory."""

    __slots__ = ("requires_grad", "ticket")

    def __init__(self, ticket: Ticket, requires_grad: bool) -> None:
        self.ticket, self.requires_grad = ticket, requires_grad


class Linked:
    """A tensor argument that the previous call returned, as leaf number ``position`` of its output."""

    __slots__ = ("position", "requires_grad")

    def __init__(self, position: int, requires_grad: bool) -> None:
        self.position, self.requires_grad = position, requires_grad


class Slot:
    """A placeholder in autograd's graph for a tensor that is computed when needed."""

    __slots__ = ("__weakref__", "call", "value", "version")

    def __init__(self, call: "Call") -> None:
        self.call = call
        self.value: Tensor | None = None
        self.version = 0


class Block:
    """A block and its place in the plan."""

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index, self.name = index, type(getattr(module, "_orig_mod", module)).__name__
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.buffers = Buffers(self.modules)
        self.path: tuple[Segment, ...] = ()
        self.leaves = False  # stored, with its saved tensors in host memory

    def __str__(self) -> str:
        return f"block {self.index} ({self.name})"


class Call:
    """A call of a block that can run again.

    Attributes:
        path: the Segments around the block, the outermost first.
        depth: the index of the Segment that runs again when a slot is empty.
        previous: the call that the linked arguments come from; None if all arguments are stored.
    """

    __slots__ = (
        "arguments",
        "block",
        "buffers",
        "depth",
        "metas",
        "path",
        "previous",
        "run",
        "running",
        "slots",
        "spec",
        "surroundings",
        "versions",
    )

    def __init__(self, block: Block, run: Run, arguments: list[Any], spec: TreeSpec, device: torch.device) -> None:
        self.block, self.run, self.arguments, self.spec = block, run, arguments, spec
        self.path = block.path
        self.depth = 0
        self.previous: Call | None = None
        self.slots: list[weakref.ref[Slot]] = []
        self.metas: list[tuple[torch.Size, torch.dtype]] = []
        self.running = True
        self.versions = [p._version for p in block.parameters]
        self.surroundings = Surroundings(block.modules, device)
        self.buffers: list[Any] = []

    def replace(self, argument: Any, other: Any) -> None:
        """Replace all occurrences of ``argument`` by ``other``, since a tensor may be passed several times."""
        self.arguments = [other if a is argument else a for a in self.arguments]
