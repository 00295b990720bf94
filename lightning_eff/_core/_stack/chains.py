"""Whether the blocks of a list follow one another: is each block fed by the one that ran before it?

The answer is read off the tensors of a real forward pass. Parallel heads, experts and towers also stand in an
``nn.ModuleList``, and none of them is fed by another.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_eff._core.patches import hook_behind

Node = Any  # torch.autograd.graph.Node, whose attributes torch does not type
Seen = Callable[[int, tuple[Any, ...], dict[str, Any], Any], None]


def tensors(*values: Any) -> list[Tensor]:
    """The floating-point tensors in arguments or outputs, however they are nested."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]


def nodes_of(values: Iterable[Tensor]) -> set[Node]:
    """The autograd nodes that computed ``values``."""
    return {t.grad_fn for t in values if t.grad_fn is not None}


def comes_of(later: Iterable[Tensor], nodes: set[Node]) -> bool:
    """Whether any of ``later`` was computed from one of ``nodes``; what is older than all of them is not searched."""
    oldest = min((node._sequence_nr() for node in nodes), default=None)
    if oldest is None:
        return False
    seen: set[Node] = set()
    front = [*nodes_of(later)]
    while front:
        node = front.pop()
        if node in nodes:
            return True
        if node in seen or node._sequence_nr() < oldest:
            continue
        seen.add(node)
        front += [other for other, _ in node.next_functions if other is not None]
    return False


def share(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether a tensor of ``some`` lies in the memory of one of ``others``."""
    there = {address for t in others if (address := _address(t)) is not None}
    return any(_address(t) in there for t in some)


def _address(t: Tensor) -> int | None:
    try:
        return t.untyped_storage()._cdata  # of fake and meta tensors, too, whose addresses are all 0
    except (RuntimeError, NotImplementedError):  # tensors without memory
        return None


class Feeding:
    """What one forward pass tells of the order of some blocks.

    Attributes:
        links: for each pair of blocks that ran one after the other: True where the first feeds the second, False where it
            does not, None where the tensors do not tell.
        met: the blocks that ran in the last pass.
    """

    def __init__(self) -> None:
        self.links: dict[tuple[int, int], bool | None] = {}
        self._last: tuple[int, list[Tensor], list[Tensor]] | None = None
        self.met: set[int] = set()

    def begin(self) -> None:
        """A new forward pass begins."""
        self._last, self.met = None, set()

    def seen(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Block ``index`` has run. Its first call in a pass counts: in a recurrence everything feeds everything later."""
        if index in self.met:
            return
        self.met.add(index)
        given, made = tensors(args, kwargs), tensors(output)
        if self._last is not None:
            before, inputs, outputs = self._last
            self.links[before, index] = fed(given, inputs, outputs)
        self._last = (index, given, made)

    def end(self) -> None:
        """The pass is over, and its tensors are no longer needed."""
        self._last = None

    @property
    def verdict(self) -> bool | None:
        """True for a chain, False for blocks that run side by side, None where it cannot be told."""
        known = [link for link in self.links.values() if link is not None]
        return all(known) if known else None


def fed(given: list[Tensor], before: list[Tensor], made: list[Tensor]) -> bool | None:
    """Whether a block that was ``given`` tensors is fed by the one before it, which was given ``before`` and ``made`` some."""
    if not given or not made:
        return None
    nodes = nodes_of(made)
    if comes_of(given, nodes) or share(given, made):
        return True
    if share(given[:1], before[:1]):  # both read the same tensor, which the first has not written to
        return False
    if nodes and any(t.grad_fn is not None for t in given):
        return False
    return None


@contextmanager
def watched(blocks: Iterable[nn.Module], seen: Seen) -> Iterator[None]:
    """Call ``seen`` with the index, the arguments and the output of each block that runs, until the context ends."""
    handles = [
        hook_behind(
            block, lambda _, args, kwargs, output, index=index: seen(index, args, kwargs, output), with_kwargs=True
        )
        for index, block in enumerate(blocks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
