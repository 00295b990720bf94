"""The content of a placeholder for logits: a linear layer's call that has not been computed, and later operations."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.data.tokens._head.rows import Rows

PLACE = object()
"""Marks the place of the logits in an operation's arguments."""


class Maker(Protocol):
    """The creator of placeholders for layers' outputs.

    Attributes:
        nodes: the nodes of its placeholders.
    """

    nodes: "weakref.WeakSet[Node]"

    def loss(self, node: "Node", arguments: dict[str, Any]) -> Tensor | None:
        """Return the cross-entropy with these arguments of the logits of ``node``, or None to compute it from the logits."""
        ...

    def read(self, node: "Node", name: str) -> None:
        """Note that the logits were computed for the operation ``name``."""
        ...


@dataclass(eq=False)
class Call:
    """A call of a linear layer that has not been computed.

    Attributes:
        maker: the object that computes losses and hears of reads.
        site: the called layer.
        x: its input, (..., D).
        weight: (V, D).
        bias: (V,), or None.
        watched: whether code waits for the gradient of the logits, which must then pass through them.
        settled: whether the logits were changed in place; from then on they are the computed tensor.
        before: hooks of FSDP2 on the logits that do not use gradients, to be called before the backward pass.
    """

    maker: Maker
    site: Any
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    watched: bool = False
    settled: bool = False
    before: list[Callable[[Tensor], Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = self.x.device.type
        self.autocast = torch.is_autocast_enabled(kind) and self.x.dtype != torch.float64
        self.dtype = torch.get_autocast_dtype(kind) if self.autocast else self.x.dtype
        self.inputs = [t for t in (self.x, self.weight, self.bias) if t is not None]
        self.differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in self.inputs)
        self._versions = [t._version for t in self.inputs]

    def casting(self) -> torch.autocast:
        """Return the autocast context of the call."""
        return torch.autocast(self.x.device.type, self.dtype if self.autocast else None, enabled=self.autocast)

    def check(self) -> None:
        """Check that the arguments of the call have not changed since.

        Raises:
            RuntimeError: if they have.
        """
        if self._versions != [t._version for t in self.inputs]:
            raise RuntimeError(
                f"FusedLinearCrossEntropy: the input or the weight of {self.site} was changed in place before its output was"
                " used, which computes it. Change a copy, or remove FusedLinearCrossEntropy."
            )

    def compute(self, swapped: dict[int, Tensor]) -> Tensor:
        """Return the layer's output, with other tensors in place of those with these ids."""
        self.check()
        tensors = [None if t is None else swapped.get(id(t), t) for t in (self.x, self.weight, self.bias)]
        with self.casting():
            return self.announced(F.linear(*tensors))  # pyright: ignore[reportArgumentType]

    def announced(self, made: Tensor) -> Tensor:
        """Return ``made``, computed from the logits, with FSDP2's hooks for its backward pass."""
        for hook in self.before if made.requires_grad else ():
            made.register_hook(hook)
        return made


@dataclass(eq=False)
class Node:
    """The content of a placeholder: a call's logits, or what operations made of them.

    In rows (x W^T + b), it is ``cap tanh(scale (x W^T + b) + shift)``, without the tanh if ``cap`` is None.

    Attributes:
        call: the call.
        rows: the positions of the rows.
        dtype: the dtype of the logits.
        parent: the node that it was made from by ``step``: the operation, its arguments and keywords.
        scale: a factor of the logits: a number, or a scalar that may have a gradient.
        shift: (V,), or None.
        cap: see above.
        normal: whether these are log-probabilities (``log_softmax``), whose cross-entropy is that of the logits.
    """

    call: Call
    rows: Rows
    dtype: torch.dtype
    parent: "Node | None" = None
    step: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
    scale: Any = None
    shift: Tensor | None = None
    cap: float | None = None
    normal: bool = False
    part: int | None = None  # the index among the operation's outputs, if there are several
    others: tuple[Tensor, ...] = ()  # arguments of the operations that have a gradient
    real: Tensor | None = None
    version: int = 0
    stand_in: "weakref.ref[Tensor] | None" = None

    def __post_init__(self) -> None:
        self.call.maker.nodes.add(self)

    def value(self) -> Tensor:
        """Return the logits, with their graph."""
        if self.real is None:
            with torch.set_grad_enabled(self.call.differentiable):
                self.real = self.call.compute({}) if self.parent is None else self._made(self.parent.value(), {})
            self.version = self.real._version
        return self.real

    def compute(self, swapped: dict[int, Tensor]) -> Tensor:
        """Compute the logits again, with other tensors in place of those with these ids."""
        return self.call.compute(swapped) if self.parent is None else self._made(self.parent.compute(swapped), swapped)

    def _made(self, of: Tensor, swapped: dict[int, Tensor]) -> Tensor:
        assert self.step is not None, "a node with a parent has a step"
        func, args, kwargs = self.step

        def put(value: Any) -> Any:
            return of if value is PLACE else swapped.get(id(value), value) if isinstance(value, Tensor) else value

        made = func(*(put(arg) for arg in args), **{key: put(value) for key, value in kwargs.items()})
        return made if self.part is None else made[self.part]

    @property
    def held(self) -> bool:
        """Whether the placeholder is still referenced."""
        return self.stand_in is not None and self.stand_in() is not None

    @property
    def changed(self) -> bool:
        """Whether the underlying logits were computed, and changed in place since."""
        node: Node | None = self
        while node is not None:
            if node.real is not None and node.real._version != node.version:
                return True
            node = node.parent
        return False

    @property
    def followed(self) -> bool:
        """Whether it is still only rows of logits."""
        return not (self.call.settled or self.call.watched or self.changed)
