"""Check that the blocks of a list follow each other: each block's input comes from the block before it.

The tensors of a real forward pass show this. Parallel heads, experts and towers are also kept in an ``nn.ModuleList``, but
none of them feeds another.
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
    """Return the floating-point tensors in arguments or outputs, also nested."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]


def nodes_of(values: Iterable[Tensor]) -> set[Node]:
    """Return the autograd nodes that computed ``values``."""
    return {t.grad_fn for t in values if t.grad_fn is not None}


def comes_of(later: Iterable[Tensor], nodes: set[Node]) -> bool:
    """Return whether any of ``later`` was computed from one of ``nodes``; nodes older than all of these are not searched."""
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


def share_memory(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Return whether a tensor of ``some`` uses the memory of one of ``others``."""
    there = {address for t in others if (address := _address(t)) is not None}
    return any(_address(t) in there for t in some)


def _address(t: Tensor) -> int | None:
    try:
        return t.untyped_storage()._cdata  # distinguishes fake and meta tensors, whose addresses are all 0
    except (RuntimeError, NotImplementedError):  # tensors without memory
        return None


class Feeding:
    """The order of some blocks, as one forward pass shows it.

    Attributes:
        links: for each pair of consecutive blocks, whether the first feeds the second; None if the tensors do not show it.
        met: the blocks that ran in the last pass.
    """

    def __init__(self) -> None:
        self.links: dict[tuple[int, int], bool | None] = {}
        self._last: tuple[int, list[Tensor], list[Tensor]] | None = None
        self.met: set[int] = set()

    def begin(self) -> None:
        """Start a forward pass."""
        self._last, self.met = None, set()

    def seen(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record that block ``index`` ran. Only its first call counts: in a recurrence all calls feed all later ones."""
        if index in self.met:
            return
        self.met.add(index)
        given, made = tensors(args, kwargs), tensors(output)
        if self._last is not None:
            before, inputs, outputs = self._last
            self.links[before, index] = fed(given, inputs, outputs)
        self._last = (index, given, made)

    def end(self) -> None:
        """Release the tensors after the pass."""
        self._last = None

    @property
    def verdict(self) -> bool | None:
        """True for a chain, False for blocks that run side by side, None if unknown."""
        known = [link for link in self.links.values() if link is not None]
        return all(known) if known else None


def fed(given: list[Tensor], before: list[Tensor], made: list[Tensor]) -> bool | None:
    """Return whether a block with inputs ``given`` is fed by one with inputs ``before`` and outputs ``made``, or None."""
    if not given or not made:
        return None
    nodes = nodes_of(made)
    if comes_of(given, nodes) or share_memory(given, made):
        return True
    if share_memory(given[:1], before[:1]):  # both read the same tensor, which the first did not change
        return False
    if nodes and any(t.grad_fn is not None for t in given):
        return False
    return None


@contextmanager
def watched(blocks: Iterable[nn.Module], seen: Seen) -> Iterator[None]:
    """Call ``seen`` with the index, arguments and output of each block that runs, until the context ends."""
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
