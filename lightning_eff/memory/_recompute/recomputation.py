"""Recomputation by a plan, over the user's own loop of blocks (Chen et al. 2016; nested, as Herrmann et al. 2019).

No tracing, and no call is merged with another: the graph is that of the plain forward pass. Where a block is to be run
again, what autograd would save of it is replaced by empty slots (saved-tensor hooks), and of the call its
arguments and surroundings are noted. A block's hidden state that is the very tensor which the block before it returned
is not kept: in the second run it comes from there. When autograd asks for an empty slot, the calls are run again from
the nearest input that is kept; what they would save goes into the slots, and the graph that comes into being meanwhile
is thrown away.

Who owns what, so that memory goes as the backward pass proceeds and no cycle is left to the garbage collector:
autograd's node -> slot -> call -> the call before it. A call refers to its slots weakly.
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
from lightning_eff.memory._recompute.noted import Away, Block, Call, Kept, Linked, Run, Slot, detached
from lightning_eff.memory._recompute.offloading import Offloading
from lightning_eff.memory._recompute.surroundings import random_state, rewound, set_random_state


class _Done(BaseException):
    """Every slot that is waited for has its tensor: the rest of the block need not run."""


class Recomputation:
    """Runs a stack's blocks by a plan: hand each call of a block to :meth:`call`.

    Attributes:
        reruns: forward calls of blocks that backward passes have added so far.

    Args:
        blocks: the stack.
        offloading: takes what a plan sends to the host; needed where it sends anything.
    """

    def __init__(self, blocks: Sequence[nn.Module], offloading: Offloading | None = None) -> None:
        self.reruns = 0
        self._offloading = offloading
        self._blocks = [Block(index, block) for index, block in enumerate(blocks)]
        self._lock = RLock()  # backward passes of several devices run on threads of their own
        self.begin()

    def follow(self, items: Sequence[Item]) -> None:
        """Take up a plan; blocks that it does not name are kept."""

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
        """A forward pass begins or is over: what comes next is linked to nothing before it."""
        self._last: Call | None = None
        self._returned: list[tuple[weakref.ref[Tensor], int] | None] = []

    def begin(self) -> None:
        """A forward pass begins."""
        self.forget()
        self._storages: dict[int, int] = {}

    @property
    def input_bytes(self) -> int:
        """Bytes of the arguments that the last forward pass kept to run blocks again from, each storage counted once."""
        return sum(self._storages.values())

    # -- the forward pass

    def call(self, index: int, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run block ``index`` as ``run(*args, **kwargs)``, keeping what the plan says.

        Raises:
            RuntimeError: if the block changes an argument in place, so that it could not be run again; later, in the
                backward pass, if what it was called with or its weights were changed since, or if it saves other tensors
                the second time.
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
                    f"Rematerialization: {block} changed an argument of shape {tuple(leaf.shape)} in place; expected it"
                    " to leave what it is given as it is, because the block runs again from the same argument. Let it"
                    " change a copy, or take such blocks out by layers=."
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
        noted: dict[int, Kept | Linked] = {}  # a tensor that is passed twice stays one, which attention asks
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
        """Let the hidden state that a segment starts from go to the host."""
        assert self._offloading is not None, "a plan that offloads comes with an Offloading"
        for argument in call.arguments:
            if isinstance(argument, Kept) and argument.value.is_floating_point() and can_leave(argument.value):
                ticket = self._offloading.put(call.block.index, argument.value)
                call.replace(argument, Away(ticket, argument.requires_grad))
                return

    def _position(self, tensor: Tensor) -> int | None:
        """Which of the tensors that the last call returned this is, unless it has been changed since."""
        for position, returned in enumerate(self._returned):
            if returned is not None and returned[0]() is tensor and returned[1] == tensor._version:
                return position
        return None

    # -- the backward pass

    def _value(self, slot: Slot) -> Tensor:
        """What autograd saved, as it asks for it: computed now, unless it is there already."""
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
        """The leaves of the call's arguments, anew."""
        block = call.block
        if call.running:
            raise RuntimeError(
                f"Rematerialization: {block} asks for gradients within its own forward pass; expected them to be asked"
                " for after it, because what it saves is not there before it has run. Take such blocks out by layers=."
            )
        if [p._version for p in block.parameters] != call.versions:
            raise RuntimeError(
                f"Rematerialization: parameters of {block} were changed between its forward and its backward pass;"
                " expected them as they were, because the block runs again. Step the optimizer after the backward pass."
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
        """Run the block once more; with ``fill``, what it saves goes into the slots. The leaves of what it returns."""
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
    """Keep what the call is to be run from once more, so that it needs no call before it."""
    for argument, value in list(zip(call.arguments, inputs, strict=True)):
        if isinstance(argument, Linked):
            call.replace(argument, Kept(value, argument.requires_grad))
    call.previous = None


def _differs(call: Call, what: str) -> RuntimeError:
    expected = ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in call.metas[:8])
    return RuntimeError(
        f"Rematerialization: run again for the backward pass, {call.block} {what}; expected the {len(call.slots)} tensors"
        f" of the first time, in their order ({expected}{', ...' if len(call.metas) > 8 else ''}), because a block must do"
        " the same in both runs. It may draw numbers from a generator other than torch's global ones, or depend on what"
        " it or others write between the runs. Take such blocks out by layers=."
    )


def _never(_: object) -> Tensor:
    raise RuntimeError(
        "Rematerialization: a block asks for gradients within its own forward pass; expected them to be asked for after"
        " it. Take such blocks out by layers=."
    )
