"""What a stand-in for logits is: a call of a linear map that has not been computed, and what was made of its output."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.data.tokens._head.rows import Rows

PLACE = object()
"""Where in an operation's arguments the logits stood."""


class Maker(Protocol):
    """Who put a stand-in where a map's output would be.

    Attributes:
        nodes: what its stand-ins are.
    """

    nodes: "weakref.WeakSet[Node]"

    def loss(self, node: "Node", arguments: dict[str, Any]) -> Tensor | None:
        """The cross-entropy with these arguments of the logits that ``node`` is of; None to compute it of the logits."""
        ...

    def read(self, node: "Node", name: str) -> None:
        """The logits have been computed for the operation ``name``."""
        ...


@dataclass(eq=False)
class Call:
    """One call of a linear map, which has not been computed.

    Attributes:
        maker: who is asked for losses and told of reads.
        site: which map it is a call of.
        x: its input, (..., D).
        weight: (V, D).
        bias: (V,), or None.
        watched: somebody waits for the gradient of the logits, which must then come by them.
        settled: the logits have been changed in place: from now on they are what was made of them.
        before: hooks of FSDP2 on the logits, which look at no gradient: to be called before the backward pass.
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
        """The autocast under which the map was called."""
        return torch.autocast(self.x.device.type, self.dtype if self.autocast else None, enabled=self.autocast)

    def check(self) -> None:
        """Raise ``RuntimeError`` if what the map was called with has changed since."""
        if self._versions != [t._version for t in self.inputs]:
            raise RuntimeError(
                f"The input or the weight of {self.site} was changed in place after the map was called and before its"
                " output was used; expected them as they were, because the output is computed where it is used. Change"
                " a copy, or take FusedLinearCrossEntropy out."
            )

    def compute(self, swapped: dict[int, Tensor]) -> Tensor:
        """The map's output, with other tensors in place of those with these ids."""
        self.check()
        tensors = [None if t is None else swapped.get(id(t), t) for t in (self.x, self.weight, self.bias)]
        with self.casting():
            return self.announced(F.linear(*tensors))  # pyright: ignore[reportArgumentType]

    def announced(self, made: Tensor) -> Tensor:
        """``made`` of the logits, whose backward pass FSDP2 gets to know of."""
        for hook in self.before if made.requires_grad else ():
            made.register_hook(hook)
        return made


@dataclass(eq=False)
class Node:
    """What a stand-in is: a call's logits, or what was made of them.

    As a tensor of rows (x W^T + b), it is ``cap tanh(scale (x W^T + b) + shift)``, without the tanh where ``cap`` is None.

    Attributes:
        call: whose.
        rows: where they stand.
        dtype: of the logits.
        parent: what it was made of, by ``step``: the operation, its arguments and keywords.
        scale: a factor of the logits: a number, or a scalar that may have a gradient.
        shift: (V,), or None.
        cap: see above.
        normal: these are logarithms of probabilities (``log_softmax``), whose cross-entropy is the logits' own.
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
    part: int | None = None  # of what the operation returns, if that is several
    others: tuple[Tensor, ...] = ()  # tensors with a gradient among the operations' arguments
    real: Tensor | None = None
    version: int = 0
    stand_in: "weakref.ref[Tensor] | None" = None

    def __post_init__(self) -> None:
        self.call.maker.nodes.add(self)

    def value(self) -> Tensor:
        """The logits, with their graph."""
        if self.real is None:
            with torch.set_grad_enabled(self.call.differentiable):
                self.real = self.call.compute({}) if self.parent is None else self._made(self.parent.value(), {})
            self.version = self.real._version
        return self.real

    def compute(self, swapped: dict[int, Tensor]) -> Tensor:
        """The logits anew, with other tensors in place of those with these ids."""
        return self.call.compute(swapped) if self.parent is None else self._made(self.parent.compute(swapped), swapped)

    def _made(self, of: Tensor, swapped: dict[int, Tensor]) -> Tensor:
        assert self.step is not None, "what has a parent has been made of it"
        func, args, kwargs = self.step

        def put(value: Any) -> Any:
            return of if value is PLACE else swapped.get(id(value), value) if isinstance(value, Tensor) else value

        made = func(*(put(arg) for arg in args), **{key: put(value) for key, value in kwargs.items()})
        return made if self.part is None else made[self.part]

    @property
    def held(self) -> bool:
        """Whether somebody still has the stand-in."""
        return self.stand_in is not None and self.stand_in() is not None

    @property
    def changed(self) -> bool:
        """Whether the logits that this is of were computed, and changed in place since."""
        node: Node | None = self
        while node is not None:
            if node.real is not None and node.real._version != node.version:
                return True
            node = node.parent
        return False

    @property
    def followed(self) -> bool:
        """Whether it is still nothing but rows of logits."""
        return not (self.call.settled or self.call.watched or self.changed)
