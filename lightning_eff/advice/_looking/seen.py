"""The observations of one training step, operation by operation."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_eff.advice._looking.frames import Place

#: Products and convolutions that have one node each in autograd's graph, by the name of the node.
NODES = {"mm": "Mm", "addmm": "Addmm", "bmm": "Bmm", "baddbmm": "Baddbmm", "convolution": "Convolution"}


@dataclass
class Twice:
    """A product or convolution that was computed a second time on the same values."""

    first: Place | None
    second: Place | None
    modules: tuple[str, ...]
    cost: float


@dataclass
class Seen:
    """The observations of one step.

    Attributes:
        waits: how often each line waited for the device, by the kind of call.
        twice: what was computed a second time.
        again: what was computed a second time with a gradient, and differs in its random draws alone.
        nodes: products and convolutions with a gradient.
        cost: multiplications of the step, with three passes for one that has a gradient.
        nan: where the first NaN came from, with the operation.
        infinite: the same for the first infinity.
        used: addresses of the storages that were read.
        looked_up: the addresses of indices of embeddings.
    """

    waits: dict[Place, dict[str, int]] = field(default_factory=dict)
    twice: list[Twice] = field(default_factory=list)
    again: list[Twice] = field(default_factory=list)
    nodes: int = 0
    cost: float = 0.0
    nan: tuple[Place | None, str] | None = None
    infinite: tuple[Place | None, str] | None = None
    used: set[int] = field(default_factory=set)
    looked_up: set[int] = field(default_factory=set)

    def wait(self, where: Place | None, kind: str) -> None:
        if where is not None:
            kinds = self.waits.setdefault(where, {})
            kinds[kind] = kinds.get(kind, 0) + 1

    def conclude(self, loss: Tensor | None) -> None:
        """Count second passes with a gradient as work done twice if the loss does not hang on them.

        Args:
            loss: of the step, with its graph; None where it is not known.
        """
        if not self.again or loss is None or loss.grad_fn is None:
            return
        if self.nodes - _nodes(loss.grad_fn) >= len(self.again):
            self.twice += self.again


def _nodes(root: Any) -> int:
    """The products and convolutions in a graph."""
    names = {f"{name}Backward0" for name in NODES.values()}
    known, waiting, found = {root}, [root], 0
    while waiting:
        node = waiting.pop()
        found += node.name() in names
        following = {one for one, _ in node.next_functions if one is not None} - known
        known |= following
        waiting += following
    return found
