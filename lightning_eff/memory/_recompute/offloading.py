"""What a plan sends to host memory: when it leaves, how far copies may lag, and when they come back."""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_eff._core.blocks import untraced_hooks
from lightning_eff.memory._hosting.host import HostStore, Ticket, can_leave
from lightning_eff.memory._planning.chain import span
from lightning_eff.memory._planning.plan import Plan

_FORMS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")


class _Stays:
    """A saved tensor that stays on its device; never itself, since an output that its own node holds is never freed."""

    __slots__ = ("_value", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._value, self._version = tensor.detach(), tensor._version

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: if it was changed in place meanwhile.
        """
        if self._value._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(self._value.shape)} is at version {self._value._version}; expected version"
                f" {self._version} instead. Plain training would fail in the same way."
            )
        return self._value


class Offloading:
    """Host memory for the items of a plan that leave, and the room that the plan leaves their copies.

    Attributes:
        store: where they wait.
    """

    def __init__(self) -> None:
        self.store = HostStore(depth=0)  # what comes back ahead of its turn is the plan's to say
        self._items: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._room: list[tuple[int | None, int]] = []
        self._tickets: list[tuple[int, Ticket]] = []

    def follow(self, plan: Plan | None) -> None:
        """Take up a plan; None, or one that sends nothing to the host, lets everything stay."""
        self._items, self._ends, self._room, self._tickets = {}, {}, [], []
        if plan is None or not any(item.offload for item in plan.items):
            return
        for k, item in enumerate(plan.items):
            start, end = span(item)
            self._items |= dict.fromkeys(range(start, end), k)
            self._ends[k] = end - 1
            self._room.append(plan.room(k))

    def begin(self) -> None:
        """A forward pass begins."""
        self._tickets = []

    def before(self, block: int) -> None:
        """Wait until so much has left as ``block`` needs room for, if an item begins with it."""
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
        """Let the item's backward pass bring back what the plan has room for beside it, if it ends with ``block``."""
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
        """In this context what autograd saves leaves, except parameters and what autocast makes of them."""
        weights = {p.untyped_storage()._cdata for p in parameters}

        def pack(tensor: Tensor) -> Ticket | _Stays:
            stays = not can_leave(tensor) or tensor.untyped_storage()._cdata in weights or _is_cast(tensor)
            return _Stays(tensor) if stays else self.put(block, tensor)

        return untraced_hooks(pack, _get)


def _get(packed: Ticket | _Stays) -> Tensor:
    return packed.get()


def _is_cast(tensor: Tensor) -> bool:
    """Whether it is a parameter in another precision."""
    node = tensor.grad_fn
    while node is not None and node.name() in _FORMS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)
