"""Recomputation by a plan, within the module's own loop over blocks (Chen et al. 2016; nested as in Herrmann et al. 2019).

There is no tracing, and calls are not merged: the graph is that of the plain forward pass. For a block that will be
recomputed, saved-tensor hooks replace what autograd would save by empty slots, and the call's arguments and context are
recorded. A hidden state that is the very tensor returned by the previous block is not stored; the second run provides it.
When autograd asks for an empty slot, the calls run again from the nearest stored input. What they save fills the slots, and
the graph of the second run is discarded.

Ownership lets memory go as the backward pass proceeds, without cycles for the garbage collector:
autograd's node -> slot -> call -> the previous call. A call refers to its slots weakly.
"""

import weakref
from collections.abc import Sequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_eff._core.blocks import untraced_hooks
from lightning_eff.memory._hosting.host import can_leave
from lightning_eff.memory._planning.chain import Item, Segment
from lightning_eff.memory._recompute.execution_context import random_state, rewound, set_random_state
from lightning_eff.memory._recompute.offloading import Offloading
from lightning_eff.memory._recompute.recorded_state import Away, Block, Call, Kept, Linked, Run, Slot, detached


class _Done(BaseException):
    """Raised when every needed slot is filled, so that the rest of the block need not run."""


class Recomputation:
    """Runs a stack's blocks by a plan; pass each call of a block to :meth:`call`.

    Attributes:
        reruns: the forward calls of blocks that backward passes have added so far.

    Args:
        blocks: the stack.
        offloading: the host memory for a plan with offloading.
    """

    def __init__(self, blocks: Sequence[nn.Module], offloading: Offloading | None = None) -> None:
        self.reruns = 0
        self._offloading = offloading
        self._blocks = [Block(index, block) for index, block in enumerate(blocks)]
        self._lock = RLock()  # backward passes of several devices run on separate threads
        self.begin()

    def follow(self, items: Sequence[Item]) -> None:
        """Adopt a plan; blocks that it does not name are stored."""

        def walk(items: Sequence[Item], path: tuple[Segment, ...]) -> None:
            for item in items:
                if isinstance(item, Segment):
                    walk(item.inner, (*path, item))
                else:
                    self._blocks[item.index].path = path
                    self._blocks[item.index].leaves = item.offload

        for block in self._blocks:
            block.path, block.leaves = (), False
        walk(items, ())

    def forget(self) -> None:
        """Forget the last call at the beginning or end of a forward pass, so that the next one is not linked to it."""
        self._last: Call | None = None
        self._returned: list[tuple[weakref.ref[Tensor], int] | None] = []

    def begin(self) -> None:
        """Begin a forward pass."""
        self.forget()
        self._storages: dict[int, int] = {}

    @property
    def input_bytes(self) -> int:
        """The bytes of the arguments that the last forward pass stored for recomputation, each storage counted once."""
        return sum(self._storages.values())

    # -- the forward pass

    def call(self, index: int, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run block ``index`` as ``run(*args, **kwargs)``, and store the tensors of the plan.

        Raises:
            RuntimeError: if the block changes an argument in place, so that it could not run again. Later, in the backward
                pass, if its arguments or weights were changed since, or if it saves other tensors the second time.
        """
        block = self._blocks[index]
        if self._offloading is None:
            return self._call(block, run, args, kwargs)
        self._offloading.before(index)
        output = self._call(block, run, args, kwargs)
        self._offloading.after(index, output)
        return output

    def _call(self, block: Block, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not block.path:
            self.forget()
            if not block.leaves or self._offloading is None:
                return run(*args, **kwargs)
            with self._offloading.hooks(block.index, block.parameters):
                return run(*args, **kwargs)
        call = self._begin(block, run, args, kwargs)
        given = tree_leaves((args, kwargs))
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in given]
        before = block.buffers.before()

        def pack(tensor: Tensor) -> Slot:
            slot = Slot(call)
            call.slots.append(weakref.ref(slot))
            call.metas.append((tensor.shape, tensor.dtype))
            return slot

        with untraced_hooks(pack, self._value):
            output = run(*args, **kwargs)
        call.running = False
        call.buffers = block.buffers.changed(before)
        for leaf, version in zip(given, versions, strict=True):
            if isinstance(leaf, Tensor) and leaf._version != version:
                raise RuntimeError(
                    f"Rematerialization: {block} changed an argument of shape {tuple(leaf.shape)} in place, but must run"
                    " again from it. Change a copy, or exclude such blocks with layers=."
                )
        if call.previous is None and call.path[0].offload:
            self._send(call)
        self._last = call
        self._returned = [
            (weakref.ref(leaf), leaf._version) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(output)
        ]
        return output

    def _begin(self, block: Block, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = tree_flatten((args, kwargs))
        last = self._last
        if last is not None and (last.path[0] is not block.path[0] or last.block.index >= block.index):
            last = None
        arguments: list[Any] = []
        noted: dict[int, Kept | Linked] = {}  # a tensor that is passed twice stays one tensor, as attention requires
        linked = False
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                arguments.append(leaf)
                continue
            if id(leaf) in noted:
                arguments.append(noted[id(leaf)])
                continue
            position = None if last is None else self._position(leaf)
            linked |= position is not None
            if position is None:
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = storage.nbytes()
                noted[id(leaf)] = Kept(leaf, leaf.requires_grad)
            else:
                noted[id(leaf)] = Linked(position, leaf.requires_grad)
            arguments.append(noted[id(leaf)])
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        call = Call(block, run, arguments, spec, device)
        call.previous = last if linked else None
        return call

    def _send(self, call: Call) -> None:
        """Send the hidden state that a segment starts from to the host."""
        assert self._offloading is not None, "a plan that offloads comes with an Offloading"
        for argument in call.arguments:
            if isinstance(argument, Kept) and argument.value.is_floating_point() and can_leave(argument.value):
                ticket = self._offloading.put(call.block.index, argument.value)
                call.replace(argument, Away(ticket, argument.requires_grad))
                return

    def _position(self, tensor: Tensor) -> int | None:
        """Return the position of ``tensor`` in the last call's output, unless it has changed since."""
        for position, returned in enumerate(self._returned):
            if returned is not None and returned[0]() is tensor and returned[1] == tensor._version:
                return position
        return None

    # -- the backward pass

    def _value(self, slot: Slot) -> Tensor:
        """Return a saved tensor when autograd asks for it, computing it if needed."""
        with self._lock:
            while slot.value is None:
                depth = slot.call.depth
                self._run_segment(slot.call)
                if slot.value is None and slot.call.depth == depth:
                    raise _differs(slot.call, "did not save as many tensors as the first time")
            value, slot.value = slot.value, None
        if value._version != slot.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(value.shape)} that {slot.call.block} saved is at version {value._version};"
                f" expected version {slot.version} instead. Plain training would fail in the same way."
            )
        return value

    def _run_segment(self, target: Call) -> None:
        """Run the calls of the target's segment again, up to the target, as its inner plan says."""
        depth, chain = target.depth, [target]
        while chain[-1].previous is not None:
            chain.append(chain[-1].previous)
        device = target.surroundings.device
        state = random_state(device)
        outputs: list[Any] = []
        inside: Segment | None = None
        try:
            while chain:
                call = chain.pop()
                child = call.path[depth + 1] if len(call.path) > depth + 1 else None
                inputs = self._inputs(call, outputs)
                outputs = []
                if child is not None:
                    if child is not inside:
                        _keep(call, inputs)
                    call.depth = depth + 1
                inside = child
                outputs = self._run_again(call, inputs, fill=child is None, last=call is target)
        finally:
            set_random_state(device, state)

    def _inputs(self, call: Call, outputs: list[Any]) -> list[Any]:
        """Return the leaves of the call's arguments."""
        block = call.block
        if call.running:
            raise RuntimeError(
                f"Rematerialization: {block} asks for gradients within its own forward pass, before its saved tensors"
                " exist. Exclude such blocks with layers=."
            )
        if [p._version for p in block.parameters] != call.versions:
            raise RuntimeError(
                f"Rematerialization: parameters of {block} were changed between its forward and its backward pass,"
                " in which it runs again. Step the optimizer after the backward pass."
            )
        inputs: list[Any] = []
        made: dict[int, Tensor] = {}
        for argument in dict.fromkeys(a for a in call.arguments if isinstance(a, Away)):
            call.replace(argument, Kept(argument.ticket.get(), argument.requires_grad))
        for argument in call.arguments:
            if id(argument) in made:
                inputs.append(made[id(argument)])
            elif isinstance(argument, Kept):
                value, version = argument.value, argument.version
                if value._version != version:
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace"
                        f" operation: an argument of {block}, of shape {list(value.shape)}, is at version"
                        f" {value._version}; expected version {version} instead, because the block runs again from it."
                        " Change a copy of it."
                    )
                made[id(argument)] = detached(value, argument.requires_grad)
                inputs.append(made[id(argument)])
            elif isinstance(argument, Linked):
                made[id(argument)] = detached(outputs[argument.position], argument.requires_grad)
                inputs.append(made[id(argument)])
            else:
                inputs.append(argument)
        return inputs

    def _run_again(self, call: Call, inputs: list[Any], *, fill: bool, last: bool) -> list[Any]:
        """Run the block again, and return the leaves of its output; with ``fill``, what it saves goes into the slots."""
        self.reruns += 1
        waiting = [i for i, slot in enumerate(call.slots) if (held := slot()) is not None and held.value is None]
        stop = waiting[-1] if fill and last and waiting else -1
        seen = 0

        def pack(tensor: Tensor) -> None:
            nonlocal seen
            seen += 1
            if seen > len(call.slots) or (tensor.shape, tensor.dtype) != call.metas[seen - 1]:
                raise _differs(
                    call, f"saved a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} as number {seen}"
                )
            slot = call.slots[seen - 1]()
            if fill and slot is not None and slot.value is None:
                slot.value, slot.version = tensor.detach(), tensor._version
            if seen - 1 == stop:
                raise _Done

        args, kwargs = tree_unflatten(inputs, call.spec)
        inputs.clear()
        try:
            with (
                rewound(call.buffers),
                call.surroundings.again(call.block.modules),
                untraced_hooks(pack, _never),
            ):
                output = call.run(*args, **kwargs)
        except _Done:
            return []
        if seen < len(call.slots):
            raise _differs(call, f"saved {seen} tensors")
        return tree_leaves(output)


def _keep(call: Call, inputs: list[Any]) -> None:
    """Store the inputs of a call, so that it no longer needs the call before it."""
    for argument, value in list(zip(call.arguments, inputs, strict=True)):
        if isinstance(argument, Linked):
            call.replace(argument, Kept(value, argument.requires_grad))
    call.previous = None


def _differs(call: Call, what: str) -> RuntimeError:
    expected = ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in call.metas[:8])
    return RuntimeError(
        f"Rematerialization: recomputed for the backward pass, {call.block} {what}; expected the {len(call.slots)} tensors"
        f" of the first run in their order ({expected}{', ...' if len(call.metas) > 8 else ''}). It may use a generator other"
        " than torch's global ones, or state that changes between the runs. Exclude such blocks with layers=."
    )


def _never(_: object) -> Tensor:
    raise RuntimeError(
        "Rematerialization: a block asks for gradients within its own forward pass, before its saved tensors exist."
        " Exclude such blocks with layers=."
    )
