"""Two streams through a stack of blocks, whose saved tensors are computed again from the outputs (Gomez et al. 2017).

A block's own code computes ``h = x + F(x)`` and ``h + G(h)``. It runs on the second stream, and its sums are replaced:

    y1 = x1 + F(x2)        x2 = y2 - G(y1)
    y2 = x2 + G(y1)        x1 = y1 - F(x2)

Between blocks the module's code has the second stream, and the first one is kept here. As in ``Recomputation``, saved-tensor
hooks leave empty slots in autograd's graph. When the backward pass asks for a slot of G, the block runs again from y1: F's
modules are skipped, and the second sum gives x2. When it asks for one of F, the block runs again from x2, and the first sum
gives x1. Both runs fill the slots. The graph is that of the forward pass, so gradients take the usual way.

Ownership: autograd's node -> slot -> call -> the next call. The last call keeps the two outputs of the stack.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_eff._core._branches.sums import Output, Sums, calls_of, replaced
from lightning_eff._core.blocks import hidden_of, split_output, untraced_hooks
from lightning_eff._core.steps import looking
from lightning_eff.memory._recompute.calls import without_caches
from lightning_eff.memory._recompute.execution_context import random_state, rewound, set_random_state
from lightning_eff.memory._recompute.recorded_state import Block, Kept, Run, Slot, detached
from lightning_eff.memory._reversible.calls import (
    HALF,
    WAY_OUT,
    WHO,
    Done,
    Entered,
    Filling,
    NotReversible,
    Pair,
    Reversed,
    differs,
    never,
    packing,
)


class Streams:
    """The state that the blocks of one stack share.

    Args:
        length: the number of blocks.

    Attributes:
        reruns: the runs of branches that backward passes have added so far.
        drift: ``|x2' - x2| / |x2|`` at the stack's input, where x2' was computed from the outputs; None before a backward pass.
        checked: blocks whose inverse was compared with their input; None outside of :meth:`check`.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.begin()

    def begin(self) -> None:
        """Forget all that was found, as at the beginning of a run."""
        self.reruns = 0
        self.drift: Tensor | None = None
        self.checked: set[int] | None = None
        self._lock = RLock()  # backward passes of several devices run on separate threads
        self._blocks: dict[int, Block] = {}
        self._skipped: dict[int, list[nn.Module]] = {}
        self._link: tuple[weakref.ref[Tensor], int, Tensor, Reversed | None, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"length": self.length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    # -- the forward pass

    def call(self, index: int, block: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run block ``index``, whose plain forward pass is ``run``, and return the second stream, or their mean at the end.

        Raises:
            NotReversible: if the block does not compute two residual sums, or did not get the previous block's output.
        """
        entered = hidden_of(args, kwargs)
        records = torch.is_grad_enabled() and not looking()
        if entered.dtype in HALF and torch.is_autocast_enabled(entered.device.type):
            wide = entered.float()
            args, kwargs = replaced(args, kwargs, entered, wide)
            entered = wide
        elif entered.dtype in HALF and records:
            raise NotReversible(
                f"{WHO}: block {index} got {entered.dtype}, in which inputs cannot be computed from outputs accurately. Use"
                " precision='bf16-mixed' or 32."
            )
        x1, before = (entered, None) if index == 0 else self._other(index, entered)
        call = None
        if records:
            args, kwargs = without_caches(args, kwargs, who=WHO)
            call = self._record(index, block, run, args, kwargs, entered)
        sums: Sums
        made: dict[int, list[Output]] = {}
        streams: list[Tensor] = []

        def first(branch: Tensor) -> Tensor:
            if call is not None:
                call.split, call.drawn = len(call.slots), random_state(entered.device)
            streams.append(x1 + branch)
            return streams[0]

        def second(branch: Tensor) -> Tensor:
            if call is not None:
                call.end = len(call.slots)
            streams.append(entered + branch)
            return streams[1]

        def note(m: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inside = sums.count == 0
            output = run(*args, **kwargs)
            if inside and sums.count == 0:
                made.setdefault(id(m), []).append(Output(output))
            return output

        sums = Sums(entered, first, second)
        before_buffers = call.block.buffers.before() if call is not None else []
        hooks = nullcontext() if call is None else untraced_hooks(packing(call), self._value)
        learns = index not in self._skipped
        watched = [*block.modules()][1:] if learns else self._skipped[index]
        with calls_of(watched if call is not None else (), note), hooks, sums:
            output = run(*args, **kwargs)
        y1, y2 = self._sums_of(index, block, streams, output)
        if call is not None:
            if len(call.slots) != call.end:
                raise NotReversible(f"{WHO}: {call.block} computes more after its second sum. {WAY_OUT}")
            if learns:
                self._skipped[index] = _outermost([m for m in watched if id(m) in made])
            call.made, call.running = made, False
            call.buffers = call.block.buffers.changed(before_buffers)
            call.flags = entered.requires_grad, y1.requires_grad
            if before is not None:
                before.next, call.before = call, weakref.ref(before)
            elif index == 0:
                call.entered = entered.detach()
            if self.checked is not None:
                call.truth = x1.detach(), entered.detach()
        if index < self.length - 1:
            self._link = weakref.ref(y2), _version(y2), y1, call, index
            return output
        self._link = None
        if call is not None:
            call.outputs = y1.detach(), y2.detach()
            if self.checked is not None:
                self._check(call)
        mean = (y1 + y2) / 2
        return mean if isinstance(output, Tensor) else type(output)((mean, *output[1:]))

    def _other(self, index: int, entered: Tensor) -> tuple[Tensor, Reversed | None]:
        """Return the first stream, and the call of the previous block."""
        link = self._link
        if link is None or link[4] != index - 1 or link[0]() is not entered or link[1] != _version(entered):
            raise NotReversible(
                f"{WHO}: block {index} did not get the very tensor that block {index - 1} returned, so its first stream is"
                " unknown. Code between the blocks changes the hidden state, or a block was skipped. Choose blocks that feed"
                " each other with layers=, or remove the callback."
            )
        return link[2], link[3]

    def _record(
        self, index: int, block: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], entered: Tensor
    ) -> Reversed:
        if index not in self._blocks:
            self._blocks[index] = Block(index, block)
        leaves, spec = tree_flatten((args, kwargs))
        noted: dict[int, Any] = {id(entered): Entered()}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in noted:
                noted[id(leaf)] = Kept(leaf, leaf.requires_grad)
        arguments = [noted[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Reversed(self._blocks[index], run, arguments, spec, entered.device)

    def _sums_of(self, index: int, block: nn.Module, streams: list[Tensor], output: Any) -> Pair:
        try:
            hidden, _ = split_output(output)
        except TypeError as e:
            raise NotReversible(f"{WHO}: {e}") from e
        if len(streams) < 2 or hidden is not streams[1]:
            raise NotReversible(
                f"{WHO}: block {index} ({type(block).__bases__[1].__name__}) computes"
                f" {('no residual sum', 'one residual sum')[len(streams)] if len(streams) < 2 else 'more after two sums'};"
                f" expected h = x + F(x), then h + G(h) as its output, without a"
                f" norm behind a sum. {WAY_OUT}"
            )
        return streams[0], streams[1]

    # -- the backward pass

    def _value(self, slot: Slot) -> Tensor:
        """Return a saved tensor when autograd asks for it, computing it if needed."""
        call: Any = slot.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{WHO}: {call.block} computes what it saved again, without a graph, so there are no second derivatives"
                " (create_graph=True). Remove the callback, or the penalty on gradients."
            )
        with self._lock:
            if slot.value is None:
                state = random_state(call.surroundings.device)
                try:
                    if call.middle is None:
                        self._second_branch(call)
                    if slot.value is None:
                        self._first_branch(call)
                finally:
                    set_random_state(call.surroundings.device, state)
            value, slot.value = slot.value, None
        if value is None:
            raise differs(call, "saved fewer tensors")
        if value._version != slot.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
                f" of shape {list(value.shape)} that {call.block} saved. Plain training would fail in the same way."
            )
        return value

    def _outputs(self, call: Reversed) -> Pair:
        if call.outputs is not None:
            return call.outputs
        if call.next is None:
            raise RuntimeError(
                f"{WHO}: a loss was computed from {call.block}, but the blocks after it did not run. Compute losses from the"
                " output of the stack, or remove the callback."
            )
        return self._inputs(call.next)

    def _inputs(self, call: Reversed) -> Pair:
        if call.middle is None:
            self._second_branch(call)
        return self._first_branch(call)

    def _second_branch(self, call: Reversed) -> None:
        """Run G again: x2 = y2 - G(y1)."""
        y1, y2 = self._outputs(call)
        found: list[Tensor] = []
        given = torch.zeros((), dtype=y2.dtype, device=y2.device).expand(y2.shape)
        queues = {key: iter(outputs) for key, outputs in call.made.items()}
        leaf = detached(y1, call.flags[1])
        filling = Filling(call, call.split, len(call.slots))

        def skip(m: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            form = next(queues.get(id(m), iter(())), None) if filling.waits else None
            return run(*args, **kwargs) if form is None else form.stand_in()

        def first(branch: Tensor) -> Tensor:
            filling.waits = False
            set_random_state(call.surroundings.device, call.drawn)
            return leaf

        def second(branch: Tensor) -> Tensor:
            with torch.no_grad():
                found.append(y2 - branch)
            raise Done

        filling.waits = True
        with calls_of(self._skipped[call.block.index], skip):
            self._again(call, given, filling, first, second)
        if not found:
            raise differs(call, "did not reach its second sum")
        call.middle = y1, found[0]
        if call.next is not None:
            call.outputs = None

    def _first_branch(self, call: Reversed) -> Pair:
        """Run F again: x1 = y1 - F(x2). The inputs are the previous call's outputs."""
        assert call.middle is not None, "_second_branch sets it"
        y1, x2 = call.middle
        found: list[Tensor] = []

        def first(branch: Tensor) -> Tensor:
            with torch.no_grad():
                found.append(y1 - branch)
            raise Done

        self._again(call, detached(x2, call.flags[0]), Filling(call, 0, call.split), first)
        if not found:
            raise differs(call, "did not reach its first sum")
        call.middle = None
        inputs = found[0], x2
        before = call.before() if call.before is not None else None
        if before is not None:
            before.outputs = inputs
        if call.entered is not None:
            self.drift = torch.dist(x2, call.entered) / call.entered.norm().clamp_min(torch.finfo(x2.dtype).tiny)
        return inputs

    def _again(self, call: Reversed, entered: Tensor, filling: "Filling", *sums: Callable[[Tensor], Tensor]) -> None:
        """Run the block again on ``entered`` until a sum ends the run."""
        self.reruns += 1
        if [p._version for p in call.block.parameters] != call.versions:
            raise RuntimeError(
                f"{WHO}: parameters of {call.block} were changed between its forward and its backward pass, in which it runs"
                " again. Step the optimizer after the backward pass."
            )
        made: dict[int, Tensor] = {}
        leaves: list[Any] = []
        for argument in call.arguments:
            if isinstance(argument, Kept):
                leaf = made.setdefault(id(argument), detached(argument.value, argument.requires_grad))
                leaves.append(leaf)
            else:
                leaves.append(entered if isinstance(argument, Entered) else argument)
        args, kwargs = tree_unflatten(leaves, call.spec)
        try:
            with (
                rewound(call.buffers),
                call.surroundings.again(call.block.modules),
                untraced_hooks(filling, never),
                Sums(entered, *sums),
            ):
                call.run(*args, **kwargs)
        except Done:
            filling.finish()

    # -- the check

    def _check(self, last: Reversed) -> None:
        """Compare the inverse of each block with its input, from exact outputs."""
        assert self.checked is not None and last.outputs is not None
        calls = [last]
        while (before := calls[-1].before and calls[-1].before()) is not None:
            calls.append(before)
        outputs = last.outputs
        state = random_state(last.surroundings.device)
        try:
            for call in calls:
                assert call.truth is not None
                call.outputs = outputs
                try:
                    got = self._inputs(call)
                    alike = all(map(_alike, got, call.truth))
                except RuntimeError:  # it saved other tensors
                    alike = False
                if not alike:
                    raise NotReversible(
                        f"{WHO}: the inputs of {call.block} do not follow from its outputs: G(h) depends on more than h, or a"
                        f" branch computes something else the second time. {WAY_OUT}"
                    )
                self.checked.add(call.block.index)
                outputs = call.truth
        finally:
            set_random_state(last.surroundings.device, state)
            self.drift, self.reruns = None, 0


def _alike(found: Tensor, true: Tensor) -> bool:
    """Return whether a computed input is the true one up to rounding, which no one knows on the meta device."""
    return found.is_meta or torch.allclose(found, true, 1e-3, 1e-3 * float(true.abs().max()))


def _version(t: Tensor) -> int:
    """Return the number of changes in place, which tensors of ``torch.inference_mode`` do not count."""
    return 0 if t.is_inference() else t._version


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for m in modules for child in [*m.modules()][1:]}
    return [m for m in modules if id(m) not in inner]
