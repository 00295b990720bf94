"""One pass of the user's own step with some of its blocks in place: others let the hidden state through, or leave."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._stack.chains import Feeding
from lightning_eff.strategies._pipeline.between_blocks import RETURNED, Between, version_of
from lightning_eff.strategies._pipeline.stack import Stack
from lightning_eff.strategies._pipeline.streams import Stream


class StageExit(BaseException):
    """Leaves the user's step at the block after a stage's last; no ``except Exception`` of theirs may stop it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Entry(torch.autograd.Function):
    """A copy of a received hidden state: a block may add to its input in place, which a leaf of the graph forbids.

    Its gradient is made contiguous, since it is sent.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous()


class Marks:
    """Told of the blocks that run in a pass."""

    def entered(self, index: int, hidden: Tensor) -> Tensor:
        """A block is called with ``hidden``; returns what it is to get instead."""
        raise NotImplementedError

    def left(self, index: int) -> None:
        """It has returned."""
        raise NotImplementedError


class Run:
    """One run of the user's step, in which a :class:`StandIn` takes each block's place.

    Args:
        stack: the blocks.
        stream: the random numbers.
    """

    def __init__(self, stack: Stack, stream: Stream) -> None:
        self.stack, self.stream, self.active = stack, stream, False
        self._shown: dict[int, tuple[dict[str, Any], dict[str, nn.Module | None]]] = {}
        for index, (parent, key) in enumerate(stack.slots):
            _, shown = self._shown.setdefault(id(parent), (parent.__dict__, dict(parent._modules)))
            shown[key] = StandIn.of(self, index, stack.blocks[index])

    def runs(self, index: int) -> bool:
        """Whether that block runs here."""
        raise NotImplementedError

    def call(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's code gets for its call of that block."""
        raise NotImplementedError

    @contextmanager
    def view(self) -> Iterator[None]:
        """Show the module's own code the blocks of this run."""
        self.active = True
        self.stream.start()
        try:
            with self.again():
                yield
        finally:
            self.active = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """Show them to a backward pass, whose checkpoints run parts of the user's code once more."""
        original = [(namespace, namespace["_modules"]) for namespace, _ in self._shown.values()]
        for namespace, shown in self._shown.values():
            namespace["_modules"] = shown
        try:
            yield
        finally:
            for namespace, modules in original:
                namespace["_modules"] = modules


class Pass(Run):
    """One run of the user's step as a stage sees it.

    Args:
        stack: the blocks.
        first: the first block that runs.
        end: the one after the last that runs; where there is such a block, the step is left there.
        stream: the random numbers.
        received: the hidden state that enters block ``first``; None if that is the model's own, or if ``first`` is 0.
        training: gradients are wanted, so that a block called without is an error.
        taint: all that blocks which do not run return is NaN, so that what depends on it is seen to: also what they return
            beside the hidden state, and before there is a received one. The hidden state that they return in the place of
            a received one always is.
        learn: note the form of the output of the blocks that run, and what enters them.
        marks: is told of them.

    Attributes:
        entered: by index, the hidden state that entered each block that ran, if ``learn``.
        feeding: whether each block was fed by the one before it, if ``learn``.
        learnt: by index, whence each block had its hidden state, where a :class:`.between.Between` is there to tell.
    """

    def __init__(
        self,
        stack: Stack,
        first: int,
        end: int,
        stream: Stream,
        received: Tensor | None = None,
        *,
        training: bool = False,
        taint: bool = False,
        learn: bool = False,
        marks: Marks | None = None,
    ) -> None:
        self.marks, self.first, self.end = marks, first, end
        self.training, self.learn = training, learn
        self.expected = 0
        self.entered: dict[int, Tensor] = {}
        self.learnt: dict[int, int] = {}
        self.feeding = Feeding()
        self.entry: Tensor | None = None
        self.received = received
        self._placed: tuple[Tensor, int] | None = None
        self.passed: Tensor | None = None
        if received is not None:
            self.entry = cast("Tensor", _Entry.apply(received))
            self.passed = torch.full_like(received.detach(), torch.nan)
        self.taint = taint
        self.origin = stack.origins.get(first) if self.entry is not None else None
        self.between = Between(self.origin) if self.origin is not None and self.origin >= 0 else None
        super().__init__(stack, stream)

    @override
    @contextmanager
    def view(self) -> Iterator[None]:
        try:
            with super().view(), self.between or nullcontext():
                yield
        finally:
            self.stack.rest()

    @override
    def runs(self, index: int) -> bool:
        return self.first <= index < self.end

    @override
    def call(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's output, the received hidden state in its form, or :class:`StageExit`."""
        if self.active:
            self.arrive(index)
            if index >= self.end:
                raise StageExit(self.stack.hidden(args, kwargs))
        if not self.runs(index):
            return self.passing(index, self.stack.hidden(args, kwargs))
        if index == self.first and self.entry is not None:
            args, kwargs = self.entering(args, kwargs)
        if self.learn:
            self.stack.watch(args, kwargs)
            self.entered[index] = self.stack.hidden(args, kwargs)
        if self.marks is not None:
            given = self.marks.entered(index, self.stack.hidden(args, kwargs))
            args, kwargs = self.stack.replaced(args, kwargs, given)
        self.stream.enter(index)
        output = block(*args, **kwargs)
        if self.learn:
            self.stack.note(index, output)
            self.feeding.seen(index, args, kwargs, output)
        if self.marks is not None:
            self.marks.left(index)
        self.stream.leave(index)
        return output

    def arrive(self, index: int) -> None:
        """Check that the module's code calls each block once, in order, and with gradients where they are wanted."""
        who, path = self.stack.who, self.stack.path
        if index != self.expected:
            raise ValueError(
                f"{who}: block {index} of {path!r} was called where block {self.expected} was expected; pipeline stages"
                " need every block to be called once in each step, in the order of the stack. Take out what calls blocks"
                " twice, in another order or not at all (layer drop, an extra forward pass in training_step), or name"
                " another stack by layers=."
            )
        self.expected += 1
        if self.training and not torch.is_grad_enabled():
            raise ValueError(
                f"{who}: block {index} of {path!r} was called without gradients in a training step; a pipeline stage"
                " would lose the gradient of the hidden state it received. A reentrant checkpoint around the block does"
                " this: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )

    def passing(self, index: int, hidden: Tensor) -> Any:
        """What a block that does not run here returns when it is given ``hidden``."""
        given = hidden
        if self.passed is not None:
            hidden = self.passed
        elif self.taint:
            hidden = torch.full_like(hidden.detach(), torch.nan)
        self.stream.leave(index)
        if self.between is not None and self.between.at is None:  # to learn where hidden states come from
            known = self.between.before(given)
            if known is not None:
                self.learnt[index] = known
            self.between.after(hidden)
        if index == self.first - 1 and self.active and self.entry is not None:
            if self.origin == RETURNED:
                self._placed = self.entry, version_of(self.entry)
                return self.stack.formed(self.entry, taint=self.taint)
            if self.between is not None:
                self.between.after(hidden, self.entry)
        return self.stack.formed(hidden, taint=self.taint)

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call of the first block that runs here, with what was received."""
        assert self.entry is not None and self.received is not None
        placed = self._placed
        if self.between is not None and self.active:
            placed = self.between.placed
            self.between.before(self.entry)
        if placed is not None and self.active:
            if self.stack.hidden(args, kwargs) is placed[0] and version_of(placed[0]) == placed[1]:
                return args, kwargs
            self.entry = cast("Tensor", _Entry.apply(self.received))  # the caller changed it since
        return self.stack.replaced(args, kwargs, self.entry)

    def finished(self) -> None:
        """Check that a step that came to its end was to come there.

        Raises:
            ValueError: if a block was not called.
        """
        if self.expected < len(self.stack.blocks):
            raise ValueError(
                f"{self.stack.who}: the step ended before it called block {self.expected} of {self.stack.path!r}; pipeline"
                " stages need every block to be called once in each step. Take out what passes blocks over (layer drop,"
                " an early return, a bare except around the blocks), or name another stack by layers=."
            )


class StandIn(nn.Module):
    """In a block's place during one pass: runs it, passes it over, or leaves.

    It belongs to one run, and so to one micro-batch, because a checkpoint may run it again in the backward pass. To
    the module's own code it looks like the block: attributes and class are the block's.
    """

    def __init__(self) -> None:
        super().__init__()
        del self.__dict__["training"]  # the block's own

    @staticmethod
    def of(run: Run, index: int, block: nn.Module) -> "StandIn":
        stand_in = StandIn.__new__(StandIn)
        stand_in.__dict__.update(_PROTOTYPE.__dict__, _run=run, _index=index, _block=block)
        if run.runs(index):
            stand_in.__dict__.update(_parameters=block._parameters, _buffers=block._buffers, _modules=block._modules)
        return stand_in

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        block = self.__dict__.get("_block")
        return StandIn if block is None else type(block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_block" in self.__dict__:
            setattr(self.__dict__["_block"], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_block"], name)

    def train(self, mode: bool = True) -> "StandIn":
        self.__dict__["_block"].train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the run gives for the call."""
        return self.__dict__["_run"].call(self.__dict__["_index"], self.__dict__["_block"], args, kwargs)


_PROTOTYPE = StandIn()


@contextmanager
def uncut(stack: Stack, stream: Stream, *, learn: bool = False, marks: Marks | None = None) -> Iterator[Pass]:
    """Run all blocks, with the random numbers that a pipeline draws."""
    run = Pass(stack, 0, len(stack.blocks), stream, learn=learn, marks=marks)
    with run.view():
        yield run


def learn_origins(stack: Stack, step: Callable[[Any], Any], batch: Any, stream: Stream) -> None:
    """Learn whence blocks have their hidden states in a training step.

    No block runs, so this can be done on each rank by itself; what the step makes of that does not matter.
    """
    end = len(stack.blocks)
    run = Pass(stack, end, end, stream)
    run.between, run.origin = Between(), None
    with rng.fork(), run.view(), suppress(Exception):
        step(batch)
    stack.origins = run.learnt
