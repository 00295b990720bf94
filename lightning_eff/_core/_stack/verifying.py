"""Verify in the first training steps that a stack's blocks feed each other, and that blocks can be skipped.

Checks that a step leaves open are repeated in the next. A run that is refused has not updated its weights yet.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_eff._core._stack.block_hooks import Handle, adds_plainly, hooked
from lightning_eff._core._stack.block_outputs import Leavings
from lightning_eff._core._stack.calls import hidden_of, split_output, takes_none
from lightning_eff._core._stack.chains import Feeding, Node, comes_of, nodes_of
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._stack.finding import Candidate, listed, outermost, stacks
from lightning_eff._core._stack.residual import adds_to, is_subtracted
from lightning_eff._core.patches import Patches


class Verifying:
    """Observes a stack's blocks in training steps, until :attr:`done`.

    Attributes:
        done: whether all checks are complete.
        fresh: whether no step has been observed.
        adds: whether blocks must return their input plus something, because they are skipped, or their branches scaled.
        skips: whether blocks do not run in some steps, so that no code may need other results of a block.
        reshaping: whether blocks may return another shape, and are then never skipped.
        skipper: the technique that skips blocks or scales branches.
    """

    def __init__(self, found: Candidate, root: nn.Module, *, who: str, adds: bool = False) -> None:
        self.done = self.reshaping = False
        self.fresh = True
        self.adds = self.skips = adds
        self.skipper = ""
        self._found, self._root, self._who = found, root, who
        self._blocks = found.named_blocks
        self._at = [*self._blocks.values()]
        self._at_once = not getattr(root, "automatic_optimization", True)  # the step itself updates weights
        self._graph, self._away = False, frozenset[int]()
        self._feeding = Feeding()
        self._waits, self._since, self._between, self._before = False, set[str](), set[str](), -1
        self._others: list[tuple[Candidate, Feeding, list[bool | None]]] = []
        self._adds: dict[int, bool | None] = {}
        self._unsplit: tuple[int, str] | None = None  # a block whose output has no hidden state that is found
        self._minus = False
        self._hidden: dict[int, Tensor] = {}
        self._rest: dict[int, list[Tensor]] = {}
        self._order: list[int] = []
        self._leavings: Leavings | None = None
        self._patches = Patches()
        self._handles: list[Handle] = []

    def begin(self, dropped: frozenset[int], *, waits: bool = False) -> None:
        """Begin a training step that skips the blocks ``dropped``; ``waits`` if the last blocks do not run at all yet."""
        self.fresh = False
        if self._handles:
            self.end()
        if compiled_around(self._root, self._found.parents):
            rank_zero_info(
                f"{self._who}: {self._found} is inside a compiled module, so the first steps cannot verify that its blocks feed"
                " each other."
            )
            self.done = True  # hooks would be compiled with it
            return
        if self._at_once:
            self._patches.set(self._root, "manual_backward", self._before_backward(self._root.manual_backward))
        self._begin_pass()
        self._graph, self._away = False, dropped
        ours = {*map(id, self._at)} if self._found.by_name else set[int]()
        others = [c for c in outermost(stacks(self._root)) if c.path != self._found.path]
        others = [c for c in others if ours.isdisjoint(map(id, c.blocks))]
        self._others = [(c, Feeding(), []) for c in others if not compiled_around(self._root, c.parents)]
        self._waits, self._since, self._between, self._before = waits, set(), set(), -1
        if self.skips and not dropped:
            self._leavings = Leavings(self._blocks)
        for index, block in enumerate(self._blocks.values()):
            if index in dropped:
                continue
            self._handles += hooked(block, self._leave(index), self._enter(index))
        for c, feeding, adds in self._others:
            for index, block in enumerate(c.named_blocks.values()):
                self._handles += hooked(block, self._seen(c.path, feeding, adds, index))

    def _begin_pass(self) -> None:
        self._hidden, self._rest, self._order = {}, {}, []
        self._feeding.begin()

    def _before_backward(self, backward: Any) -> Any:
        """Check a loss, whose blocks have run, before it updates any weights."""

        def manual_backward(loss: Any, *args: Any, **kwargs: Any) -> None:
            trouble = self._trouble(loss)
            if trouble is not None:
                raise ValueError(trouble)
            backward(loss, *args, **kwargs)

        return manual_backward

    def _enter(self, index: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if block is self._at[index] and takes_none(args, kwargs):
                raise ValueError(
                    f"{self._who}: block {index} of {self._found} is given no floating-point tensor, so that no block feeds"
                    f" it. {self._way_out(self._who)}"
                )
            if self._leavings is not None and block is self._at[index]:
                self._leavings.enter(index, block)

        return hook

    def _leave(self, index: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if block is not self._at[index]:  # a copy, with the hooks of its original
                return
            if torch.is_grad_enabled() and not self._graph:  # an earlier pass without a graph shows less
                self._graph = True
                self._begin_pass()
            self._see(index, args, kwargs, output)
            if self._leavings is not None:
                self._leavings.leave(index)
            try:
                entered, (left, rest) = hidden_of(args, kwargs), split_output(output)
            except TypeError:
                self._unsplit = self._unsplit or (index, type(output).__name__)
                return
            self._note(index, entered, left, rest)
            if self.adds and self._adds[index] is None and block._compiled_call_impl is not None:
                self._adds[index] = adds_plainly(block, args, kwargs)

        return hook

    def passed(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Note that a block was called and skipped. In a stack by name, its input shows as much as that of a block that ran."""
        if self._handles and self._found.by_name and torch.is_grad_enabled():
            self._see(next(i for i, each in enumerate(self._at) if each is block), args, kwargs, output)

    def _see(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if index > self._before:  # else another pass over the blocks begins
            self._between |= self._since
        self._since.clear()
        self._before = index
        self._feeding.seen(index, args, kwargs, output)

    def _note(self, index: int, entered: Tensor, left: Tensor, rest: tuple[Any, ...] | None) -> None:
        if self._order and self._order[-1] != index:
            before = self._hidden[self._order[-1]]
            self._minus |= is_subtracted(entered, before)
        if index not in self._hidden:
            self._order.append(index)
            self._hidden[index], self._rest[index] = left, [t for t in rest or () if isinstance(t, Tensor)]
            if self._adds.get(index) is None:
                reshapes = self.reshaping and entered.shape != left.shape
                self._adds[index] = None if reshapes else adds_to(entered, left)

    def end(self) -> None:
        """Remove the hooks after the forward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._patches.restore()
        self._feeding.end()
        for _, feeding, _ in self._others:
            feeding.end()
        if self._leavings is not None:
            self._leavings.end()

    def look(self, output: Any) -> None:
        """Raise ``ValueError`` if the step, which returned ``output``, showed that this is not a stack to act on.

        Raises:
            ValueError: with the reason, and the lists that are stacks.
        """
        if not self._handles:
            return
        self.end()
        trouble = self._trouble(output)
        read_of, self._leavings = self._leavings, None
        chain, loss = self._feeding.verdict, _loss(output)
        self._hidden, self._rest = {}, {}
        if trouble is not None:
            raise ValueError(trouble)
        adds = [*self._adds.values()]
        added = not self.adds or True in adds or (bool(adds) and None not in adds)
        looked = not self.skips or (loss is not None and read_of is not None)
        self.done = chain is not None and added and looked

    def _trouble(self, output: Any) -> str | None:
        """Return what is wrong, as a message with the technique's name, or None."""
        who = self._who
        if self._feeding.verdict is False:
            first, second = next(pair for pair, fed in self._feeding.links.items() if fed is False)
            return (
                f"{who}: block {second} of {self._found} is not fed by block {first}, so they are no stack."
                f" {self._way_out(who)}"
            )
        later = [(first, second) for (first, second), fed in self._feeding.links.items() if fed and second < first]
        if later and self._found.by_name:
            return (
                f"{who}: the module runs block {later[0][1]} of {self._found} after block {later[0][0]}, and {who} needs the"
                f" order in which they run. Give their paths in that order, layers=[...], or remove {who}."
            )
        part = self._other_part()
        if part is not None:
            return (
                f"{who}: each layer has a part in {self._found} and another in {part}, and {who} would grow the first alone."
                f" Put the parts of a layer into one module, or remove {who}."
            )
        if not self.adds:
            return None
        who = self.skipper or who
        if self._unsplit is not None:
            return f"{returned(*self._unsplit, self._found, who)} {self._way_out(who)}"
        if not self._feeding.met and self._is_used(output):
            return uncalled(self._found, who)
        plain = [index for index, adds in self._adds.items() if adds is False]
        if plain:
            return (
                f"{who}: block {plain[0]} of {self._found} does not return its input plus something, so a skipped block"
                f" could not hand its input on. {self._way_out(who)}"
            )
        if self._minus:
            return (
                f"{who}: the module subtracts what a block of {self._found} returns, so a skipped block, which returns"
                f" its input, would leave nothing. {self._way_out(who)}"
            )
        if not self.skips:
            return None
        if self._leavings is not None and self._leavings.reads:
            name, index = next(iter(self._leavings.reads.items()))
            return (
                f"{who}: the module reads {name}, which block {index} sets only when it runs, so a skipped block would"
                f" leave a value of another batch. Return the value from the block's forward, or remove {who}."
            )
        index = self._read_beside(output)
        if index is not None:
            return (
                f"{who}: the loss uses more outputs of block {index} of {self._found} than its first tensor, which a"
                f" skipped block does not compute. {self._way_out(who)}"
            )
        return None

    def _other_part(self) -> Candidate | None:
        """Return another stack that the module ran as far as the blocks that it was shown, or alternating with all of them."""
        if self._found.by_name:
            beside = [c for c, _, _ in self._others if c.length == len(self._at) and c.path in self._between]
            return next((c for c in beside if self._waits and _parent(c) == _parent(self._found)), None)
        runs = set(range(len(self._at))) - self._away
        beside = [
            c
            for c, feeding, _ in self._others
            if c.length == len(self._at) and feeding.met == runs and _parent(c) == _parent(self._found)
        ]
        return beside[0] if self._away and beside else None

    def _is_used(self, output: Any) -> bool:
        """Return whether the loss depends on a parameter of the blocks."""
        loss, own = _loss(output), {id(p) for block in self._at for p in block.parameters()}
        front, seen = [] if loss is None else [*nodes_of([loss])], set[Node]()
        while front:
            node = front.pop()
            if id(getattr(node, "variable", None)) in own:
                return True
            fresh = {other for other, _ in node.next_functions if other is not None} - seen
            seen |= fresh
            front += fresh
        return False

    def _read_beside(self, output: Any) -> int | None:
        """Return a block of which the loss uses another output than the hidden state, other than through later blocks."""
        loss = _loss(output)
        if loss is None or not any(self._rest.values()):
            return None
        hidden, beside = nodes_of(self._hidden.values()), dict[Node, int]()
        for index in self._order:
            for node in nodes_of(self._rest[index]) - hidden:
                beside[node] = index
        oldest = min((node._sequence_nr() for node in {*hidden, *beside}), default=0)
        front, met, seen = [*nodes_of([loss])], set[int](), set[Node]()
        while front:
            node = front.pop()
            if node in seen or node._sequence_nr() < oldest:
                continue
            seen.add(node)
            if node in beside:
                met.add(beside[node])
            elif node not in hidden:
                front += [other for other, _ in node.next_functions if other is not None]
        last = self._order[-1]
        handed_on = len(self._order) > 1 and comes_of(self._rest[last], nodes_of(self._rest[self._order[-2]]))
        return min(met - ({last} if handed_on else set()), default=None)

    def _seen(self, path: str, feeding: Feeding, adds: list[bool | None], index: int) -> Any:
        """Observe a block of another stack, which a message may recommend."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            feeding.seen(index, args, kwargs, output)
            if self._feeding.met:
                self._since.add(path)
            if self.adds:
                try:
                    adds.append(adds_to(hidden_of(args, kwargs), split_output(output)[0]))
                except TypeError:
                    adds.append(False)

        return hook

    def _way_out(self, who: str) -> str:
        chains = [c for c, feeding, adds in self._others if feeding.verdict and (all(adds) or not self.adds)]
        if not chains:
            return f"Remove {who}."
        return f"Name another stack, such as layers={chains[0].path!r}, or remove {who}. Stacks: {listed(chains)}."


def uncalled(stack: object, who: str) -> str:
    """Word the error for blocks that the module runs in another way than by calling them."""
    return (
        f"{who}: the module runs {stack} without calling its blocks (it calls block.forward, or parts of a block), so {who}"
        f" cannot see what a block returns. Call each block, as in x = block(x), or remove {who}."
    )


def returned(index: int, kind: str, stack: object, who: str) -> str:
    """Word the problem that a block returns a value of another ``kind`` than those with a hidden state."""
    return (
        f"{who}: block {index} of {stack} returns {kind}, so it is unknown what a skipped block must return; expected a"
        " tensor, or a tuple that begins with one."
    )


def _parent(found: Candidate) -> str:
    return found.home.rpartition(".")[0] if found.keys is None else found.home


def _loss(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) and loss.grad_fn is not None else None
