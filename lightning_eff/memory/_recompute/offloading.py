"""Execute the host copies of a plan: when they leave, how far they may lag, and when they return."""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_eff._core.blocks import untraced_hooks
from lightning_eff.memory._hosting.host import HostStore, Ticket, can_leave
from lightning_eff.memory._hosting.staying import Staying
from lightning_eff.memory._planning.chain import span
from lightning_eff.memory._planning.plan import Plan

_FORMS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")


class Offloading:
    """Host memory for the offloaded items of a plan, and the device memory that the plan allows their copies.

    Attributes:
        store: the host memory.
    """

    def __init__(self) -> None:
        self.store = HostStore(depth=0)  # the plan decides what is prefetched
        self._items: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._room: list[tuple[int | None, int]] = []
        self._tickets: list[tuple[int, Ticket]] = []

    def follow(self, plan: Plan | None) -> None:
        """Adopt a plan; None, or one without offloading, keeps everything on the device."""
        self._items, self._ends, self._room, self._tickets = {}, {}, [], []
        if plan is None or not any(item.offload for item in plan.items):
            return
        for k, item in enumerate(plan.items):
            start, end = span(item)
            self._items |= dict.fromkeys(range(start, end), k)
            self._ends[k] = end - 1
            self._room.append(plan.room(k))

    def begin(self) -> None:
        """Begin a forward pass."""
        self._tickets = []

    def before(self, block: int) -> None:
        """If an item begins with ``block``, wait until enough has left to make room for it."""
        k = self._items.get(block)
        if k is None or self._items.get(block - 1) == k:
            return
        most = self._room[k][0]
        if most is None:
            return
        units = {id(t._unit): t._unit for _, t in self._tickets if t._unit is not None}.values()
        leaving = [unit for unit in units if unit._left is not None and not unit._left.query()]
        while leaving and sum(unit.nbytes for unit in leaving) > most:
            leaving.pop(0)._left.synchronize()

    def after(self, block: int, output: Any) -> None:
        """If an item ends with ``block``, let its backward pass bring back what the plan has room for."""
        k = self._items.get(block)
        if k is None or self._ends[k] != block:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._bring(k))
                return

    def _bring(self, k: int) -> None:
        left = self._room[k][1]
        for item, ticket in reversed(self._tickets):
            if item >= k:
                continue
            left -= ticket.nbytes
            if left < 0:
                return
            ticket.prefetch()

    def put(self, block: int, tensor: Tensor) -> Ticket:
        """Send ``tensor``, which belongs to ``block``, to the host."""
        ticket = self.store.put(tensor)
        self._tickets.append((self._items[block], ticket))
        return ticket

    def hooks(self, block: int, parameters: list[nn.Parameter]) -> saved_tensors_hooks:
        """Return a context in which saved tensors leave, except parameters and their autocast copies."""
        weights = {p.untyped_storage()._cdata for p in parameters}

        def pack(tensor: Tensor) -> Ticket | Staying:
            stays = not can_leave(tensor) or tensor.untyped_storage()._cdata in weights or _is_cast(tensor)
            return Staying(tensor) if stays else self.put(block, tensor)

        return untraced_hooks(pack, _get)


def _get(packed: Ticket | Staying) -> Tensor:
    return packed.get()


def _is_cast(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a parameter in another precision."""
    node = tensor.grad_fn
    while node is not None and node.name() in _FORMS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)
