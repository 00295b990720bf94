"""The stack of repeated blocks in any module: which blocks run, and which parameters are trained.

Blocks are never added or removed, so parameters always exist in full and under the plain module's names. During a step,
a list of blocks (``nn.ModuleList`` or ``nn.Sequential``) shows the module's code only the active blocks, and dropped
blocks return their input. Outside a step nothing is changed. Some containers always show all blocks: an ``nn.Sequential``
that also contains other modules, an ``nn.ModuleDict``, and a module whose blocks are attributes. There, the blocks that
do not run return their input.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_eff._core._stack.calls import copy_block as copy_block
from lightning_eff._core._stack.calls import hidden_of as hidden_of
from lightning_eff._core._stack.calls import split_output as split_output
from lightning_eff._core._stack.compiled import uncompiled as uncompiled
from lightning_eff._core._stack.compiled import untraced_hooks as untraced_hooks
from lightning_eff._core._stack.derived_lists import Made, hooked_since, hooks_so_far
from lightning_eff._core._stack.finding import Candidate as Candidate
from lightning_eff._core._stack.finding import Layers as Layers
from lightning_eff._core._stack.finding import candidates as candidates
from lightning_eff._core._stack.finding import find_stack as find_stack
from lightning_eff._core._stack.finding import find_stages as find_stages
from lightning_eff._core._stack.finding import listed as listed
from lightning_eff._core._stack.finding import outermost as outermost
from lightning_eff._core._stack.finding import refuse_compiled_around as refuse_compiled_around
from lightning_eff._core._stack.finding import repeated as repeated
from lightning_eff._core._stack.finding import signature as signature
from lightning_eff._core._stack.finding import stacks as stacks
from lightning_eff._core._stack.partial_views import InPlaceOf as InPlaceOf
from lightning_eff._core._stack.partial_views import Passing, Sequence, Still, put_on, take_off
from lightning_eff._core._stack.verifying import Verifying, returned, uncalled
from lightning_eff._core.patches import Patches, hook_before, hook_behind

Mix = Callable[[int, Tensor, Tensor, bool], Tensor]


class BlockStack:
    """A stack of blocks, and which part of it the next step runs.

    Attributes:
        active: how many blocks, counted from the front, run. The others are hidden.
        keep: the probability with which each active block was kept, if blocks may be dropped. A kept block's residual
            branch is scaled by its inverse.
        dropped: indices of the blocks that the next training step skips.
        absent: indices of active blocks that are hidden in the next training step. The first block is never among them,
            because the others may need its output.
        carries: whether blocks return tensors in addition to the hidden state, which later blocks may need (T5's position
            bias). None until a block has run. The first block of such a stack cannot be dropped.
        reshapes: indices of the blocks that returned a hidden state of another shape, where this is allowed.
        mixes: functions by technique name, called within a step as ``mix(index, entered, left, training)`` with a block's
            input and output hidden states, of the same shape. The result replaces the output.
        scales: whether blocks are dropped, or their residual branches scaled.
        still: how many blocks, counted from the front, get no gradient. In a training step the backward pass ends there.
        verifying: checks in the first training steps that this is a stack; None if that is known or irrelevant.
        held: parameters that :meth:`freeze_inactive` also freezes. They must include those of still blocks.
    """

    def __init__(self, found: Candidate, root: nn.Module | None = None, *, who: str = "BlockStack") -> None:
        """Wrap a found stack; ``root`` is the module around it, whose own caches of its blocks are kept consistent."""
        self._who, self._skipper = who, ""
        self.path = found.path
        self.container, self.by_name = found.container, found.by_name
        self.holder = found.blocks[-1] if found.by_name else found.container  # contains the blocks and little else
        self.blocks: list[nn.Module] = found.blocks
        self._names = [*found.named_blocks]
        self._alone = found.in_list
        self._label = str(found)
        self.keep: list[float] = []
        self.dropped: frozenset[int] = frozenset()
        self.absent: frozenset[int] = frozenset()
        self._without: frozenset[int] = frozenset()
        self.carries: bool | None = None
        self.reshapes: set[int] = set()
        self.mixes: dict[str, Mix] = {}
        self.still = 0
        self.held: list[nn.Parameter] = []
        self.verifying: Verifying | None = None
        self._root = root
        self._active = len(self.blocks)
        self._made: Made | None = None
        self._made_short: tuple[int, Made] | None = None
        self._arity: int | None = None
        self._opaque: ValueError | None = None
        self._carried: tuple[Any, ...] | None = None
        self._training = self._shown = self.scales = self._reshaping = self._watched = False
        self._calls = 0
        self._away: frozenset[int] = frozenset()
        self._trouble: ValueError | None = None
        self._handles: list[RemovableHandle] = []
        self._patches = Patches()
        self._guards: list[RemovableHandle] = []
        self.frozen: dict[nn.Parameter, bool] = {}

    @property
    def active(self) -> int:
        return self._active

    @active.setter
    def active(self, count: int) -> None:
        if count != self._active:
            self._forget()
        self._active = count

    def __len__(self) -> int:
        return len(self.blocks)

    def __str__(self) -> str:
        return self._label

    # -- within a step

    @contextmanager
    def view(self, *, training: bool) -> Iterator[None]:
        """Show only the active blocks, and in training skip the dropped ones, until the context ends."""
        if training and self.verifying is not None and not self._shown:
            waiting = range(self._active, len(self.blocks))
            self.verifying.begin(self.dropped | self.absent | frozenset(waiting), waits=bool(waiting))
        partly = self._active < len(self.blocks)
        absent = self.absent if training else self._without
        if self._shown or not (
            partly or absent or self.mixes or (training and (self.dropped or self.keep or self.still))
        ):
            yield
            return
        away = [*self._waiting(), *(self.blocks[index] for index in sorted(absent))]
        passing = [*away, *(self.blocks[index] for index in sorted(self.dropped - absent) if training)]
        self._away = frozenset(map(id, away))
        self._shown, self._training, hooks = True, training, hooks_so_far()
        if partly and self._alone and self._root is not None:
            self._made = self._made or Made(self._root, self.blocks, self._active)
            self._made.begin()
        passed = self.dropped | absent
        still = [block for i, block in enumerate(self.blocks[: self.still]) if training and i not in passed]
        for block in passing:
            put_on(block, Passing, self)
        for block in still:
            put_on(block, Still, self)
        if partly and self._alone:
            put_on(self.container, Sequence, self)
        try:
            yield
        finally:
            for module in (*passing, *still, *((self.container,) if partly and self._alone else ())):
                take_off(module)
            self._shown = self._training = False
            self._carried = None
            if self._made is not None:
                self._made.end()
            if partly and self._alone and hooks_so_far() != hooks:
                self._trouble = self._hooks_of_some(hooks)

    @contextmanager
    def without(self, blocks: frozenset[int]) -> Iterator[None]:
        """Hide these active blocks in evaluation until the context ends."""
        self._without = blocks
        try:
            yield
        finally:
            self._without = frozenset()

    @contextmanager
    def shortened(self, count: int) -> Iterator[None]:
        """Show only the first ``count`` (at least 1) of the running blocks in a forward-only pass within a step."""
        if count >= self._active:
            yield
            return
        active, away, worn = self._active, self._away, not self._alone or isinstance(self.container, Sequence)
        if self._alone and self._root is not None and (self._made_short is None or self._made_short[0] != count):
            self._made_short = count, Made(self._root, self.blocks, count)
        made = self._made_short
        self._active = count
        more = [block for block in self._waiting() if not isinstance(block, Passing)]
        still = [block for block in more if isinstance(block, Still)]
        self._away = away | set(map(id, more))
        if made is not None:
            made[1].begin()
        for block in still:
            take_off(block)
        for block in more:
            put_on(block, Passing, self)
        if not worn:
            put_on(self.container, Sequence, self)
        try:
            yield
        finally:
            for module in (*more, *(() if worn else (self.container,))):
                take_off(module)
            for block in still:
                put_on(block, Still, self)
            self._active, self._away = active, away
            if made is not None:
                made[1].end()
                made[1].forget()

    def _waiting(self) -> list[nn.Module]:
        """Return the blocks that do not run, each once. A block that also occurs among the active ones runs."""
        run = {id(block) for block in self.blocks[: self._active]}
        return list({id(block): block for block in self.blocks[self._active :] if id(block) not in run}.values())

    def running(self) -> list[nn.Module]:
        """Return the blocks that the network has now, or within a step those that this step runs."""
        passed = self.dropped | self.absent if self._shown and self._training else ()
        return [block for index, block in enumerate(self.blocks[: self._active]) if index not in passed]

    def walk(self) -> Iterator[nn.Module]:
        """Yield the blocks that run, then the others if the caller only registered hooks on each block and called none."""
        calls, hooks, hooked = self._calls, hooks_so_far(), False
        for block in self.blocks[: self._active]:
            yield block
            hooked = hooked_since(block, hooks)
            hooks = hooks_so_far()
        if hooked and calls == self._calls:
            yield from self.blocks[self._active :]

    def is_away(self, block: nn.Module) -> bool:
        return id(block) in self._away

    def is_still(self, block: nn.Module) -> bool:
        return any(block is other for other in self.blocks[: self.still])

    def pass_on(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a skipped block's input hidden state, with the other outputs as the last block that ran returned them."""
        hidden = hidden_of(args, kwargs)
        if self.verifying is not None and self._training:
            self.verifying.adds = self.verifying.skips = True
            self.verifying.passed(block, args, kwargs, hidden)
        if self._opaque is not None:
            raise self._opaque
        if self._skipper and self.carries is None:  # no call of a block has been seen
            raise ValueError(uncalled(self, self._skipper))
        if self._arity is None:
            return hidden
        return (hidden, *(self._carried if self._carried is not None else (None,) * (self._arity - 1)))

    def verify(self, output: Any) -> None:
        """Raise ``ValueError`` if a training step, which returned ``output``, showed that this is not a stack to act on."""
        if self.verifying is not None:
            self.verifying.look(output)
            self.verifying = None if self.verifying.done else self.verifying

    def look(self) -> None:
        """Raise ``ValueError`` if the last step used the blocks in a way that cannot be supported."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def _hooks_of_some(self, since: int) -> ValueError | None:
        """Return an error if the step registered hooks on exactly the blocks that it saw, so later blocks would lack them."""
        hooked = [index for index, block in enumerate(self.blocks) if hooked_since(block, since)]
        if not hooked or hooked[-1] != self._active - 1:
            return None
        return ValueError(
            f"A step registered hooks on the blocks {hooked} of {self}, where {self._active} run now; blocks that run later"
            " would have no hooks. Register them in __init__, setup or on_fit_start, or in a loop over the blocks"
            " (for block in blocks)."
        )

    def _forget(self) -> None:
        if self._made is not None:
            self._made.forget()
        self._made = self._made_short = None

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the blocks' output. The technique that sets :attr:`active` saves that number itself."""
        state = {"length": len(self.blocks), "carries": self.carries, "arity": self._arity}
        return {**state, "reshapes": sorted(self.reshapes)} if self.reshapes else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.carries, self._arity = state["carries"], state["arity"]
        self.reshapes = set(state.get("reshapes", ()))

    def watch(self, *, scales: bool, reshaping: bool = False, skips: bool | None = None, who: str = "") -> None:
        """Observe the form of the blocks' output until :meth:`release`.

        Args:
            scales: kept residual branches are scaled by 1/p, so an output that cannot be scaled raises an error.
            reshaping: blocks may return a hidden state of another shape. These are noted and not scaled.
            skips: blocks do not run in some steps; None means that this is so if ``scales``.
            who: the technique that scales or skips, for messages.
        """
        self.scales |= scales
        self._reshaping |= reshaping
        self._skipper = self._skipper or who
        if self.verifying is not None:
            self.verifying.adds |= scales or bool(skips)
            self.verifying.skips |= scales if skips is None else skips
            self.verifying.reshaping |= reshaping
            self.verifying.skipper = self.verifying.skipper or who
        if not self._watched:
            self._watched = True
            for index, block in enumerate(self.blocks):
                if block._compiled_call_impl is None:
                    self._handles.append(hook_behind(block, self._hook(index), with_kwargs=True))
                else:  # the compiler would trace a hook, and compile again for each state of this object
                    compiled = functools.partial(_heard, self._hook(index), block, block._compiled_call_impl)
                    self._patches.set(block, "_compiled_call_impl", compiled)
        self._guard()

    def _guard(self) -> None:
        """Make parts of blocks that do not run refuse calls in a step, unless a running block shares them."""
        for handle in self._guards:
            handle.remove()
        used = {id(m) for block in self.blocks[: self._active] for m in block.modules()}
        self._guards = [
            hook_before(part, self._refuse_part(f"{self._names[index]}.{name}", part))
            for index, block in enumerate(self.blocks)
            if index >= self._active
            for name, part in block.named_modules()
            if part is not block and id(part) not in used
        ]

    def _refuse_part(self, name: str, part: nn.Module) -> Any:
        def hook(called: nn.Module, args: tuple[Any, ...]) -> None:
            if self._shown and called is part:  # a copy may be called
                raise ValueError(
                    f"{name} was called in a step, but its block does not run: only the first {self._active} blocks of {self}"
                    " do. The module keeps parts of its blocks in another list. Call whole blocks, or name another stack"
                    " by layers=."
                )

        return hook

    def _hook(self, index: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if block is not self.blocks[index]:  # a copy, with the hooks of its original
                return None
            self._calls += 1
            if self._training and index in self.dropped:
                return None
            try:
                hidden, rest = split_output(output)
            except TypeError:
                who = self._skipper or self._who
                why = returned(index, type(output).__name__, self, who)
                self._opaque = ValueError(f"{why} Name another stack by layers=, or remove {who}.")
                if self.scales:
                    raise self._opaque from None
                return None
            if self._arity is None and rest is not None:
                self._arity = 1 + len(rest)
            if self.carries is None:
                self.carries = rest is not None and any(isinstance(value, Tensor) for value in rest)
            if self._shown:
                self._carried = rest
            return self._scaled(index, hidden_of(args, kwargs), hidden, rest) if self.scales else None

        return hook

    def _scaled(self, index: int, entered: Tensor, hidden: Tensor, rest: tuple[Any, ...] | None) -> Any:
        if entered.shape != hidden.shape and self._reshaping:
            self.reshapes.add(index)
            return None
        if entered.shape != hidden.shape:
            raise ValueError(
                f"Block {index} of {self.path!r} took a hidden state of shape {tuple(entered.shape)} and returned"
                f" {tuple(hidden.shape)}; expected the same shape, because a block that changes it cannot be skipped."
                " Name another stack by layers=."
            )
        for mix in self.mixes.values() if self._shown else ():
            hidden = mix(index, entered, hidden, self._training)
        p = self.keep[index] if self._training and index < len(self.keep) else 1.0
        if p == 1.0:
            return None if not self.mixes else hidden if rest is None else (hidden, *rest)
        dtype = torch.promote_types(entered.dtype, hidden.dtype)
        # h + (block(h) - h) / p
        entered, hidden = (t if t.dtype == dtype else t.to(dtype) for t in (entered, hidden))
        hidden = torch.lerp(entered, hidden, 1.0 / p)
        return hidden if rest is None else (hidden, *rest)

    # -- inactive blocks

    def freeze_inactive(self) -> None:
        """Freeze the held parameters and those that only inactive blocks use. Parameters that the user froze stay frozen."""
        self.thaw()
        used = {id(p) for block in self.blocks[: self._active] for p in block.parameters()}
        away = {p: None for block in self.blocks[self._active :] for p in block.parameters() if id(p) not in used}
        for p in {**away, **dict.fromkeys(self.held)}:
            self.frozen[p] = p.requires_grad
            p.requires_grad_(False)
            p.grad = None
        self._guard()

    def thaw(self) -> None:
        """Restore the ``requires_grad`` of frozen parameters."""
        while self.frozen:
            p, flag = self.frozen.popitem()
            p.requires_grad_(flag)

    def release(self) -> None:
        """Remove all hooks and patches from the module, and forget the settings."""
        for handle in (*self._handles, *self._guards):
            handle.remove()
        self._patches.restore()
        self._handles, self._guards, self._watched = [], [], False
        if self.verifying is not None:
            self.verifying.end()
            self.verifying = None
        self._forget()
        self.thaw()
        self.keep, self.dropped, self.scales, self._reshaping = [], frozenset(), False, False
        self.absent = frozenset()
        self.mixes, self.still, self.held = {}, 0, []


def _heard(hook: Callable[..., Any], block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled block, then ``hook`` outside the compiled code."""
    output = call(*args, **kwargs)
    changed = hook(block, args, kwargs, output)
    return output if changed is None else changed
