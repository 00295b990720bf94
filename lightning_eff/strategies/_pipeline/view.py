"""Runs the user's step with some of its blocks; others pass the hidden state through or end the step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._stack.chains import Feeding
from lightning_eff._core.blocks import split_output
from lightning_eff.strategies._pipeline.between_blocks import RETURNED, Between, version_of
from lightning_eff.strategies._pipeline.stack import Stack
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._side_outputs.places import Before, Values


class StageExit(BaseException):
    """Ends the user's step at the block after a stage's last; ``except Exception`` does not catch it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Entry(torch.autograd.Function):
    """Copies a received hidden state, because a block can add to its input in place, which a leaf forbids.

    The gradient is made contiguous for sending.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous()


class Marks:
    """Receives the calls of blocks in a pass."""

    def entered(self, index: int, hidden: Tensor) -> Tensor:
        """Note that a block is called with ``hidden``, and return the hidden state for it."""
        raise NotImplementedError

    def left(self, index: int, beside: Values) -> None:
        """Note that the block returned, and left these tensors next to its hidden state."""
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
        """Return the result of the module's call of that block."""
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
        """Show these blocks to a backward pass, in which checkpoints run parts of the user's code again."""
        original = [(namespace, namespace["_modules"]) for namespace, _ in self._shown.values()]
        for namespace, shown in self._shown.values():
            namespace["_modules"] = shown
        try:
            yield
        finally:
            for namespace, modules in original:
                namespace["_modules"] = modules


class Pass(Run):
    """One run of the user's step with the blocks of a stage.

    Skipped blocks return NaN for a hidden state that the stage receives later. With ``taint`` everything that they return is
    NaN, so that wrong dependencies become visible.

    Args:
        stack: the blocks.
        first: the first block that runs.
        end: the block after the last one that runs, at which the step ends, if it exists.
        stream: the random numbers.
        received: the hidden state that enters block ``first``; None uses the model's own.
        beside: the tensors that earlier blocks left next to their hidden states, by block.
        still: whether all blocks leave zeros there.
        training: whether gradients are needed; then a block called without gradients is an error.
        taint: see above.
        learn: whether to record the inputs and the form of the outputs of blocks.
        watch: whether to look for tensors in places where blocks left none when these were learnt.
        marks: receives the calls of blocks.

    Attributes:
        beside: the tensors that blocks left next to their hidden states so far, by block, with those received.
        entered: with ``learn``, the hidden state that entered each block, by index.
        feeding: with ``learn``, whether each block was fed by the one before.
        learnt: the origin of each block's hidden state by index, if a :class:`.between_blocks.Between` finds it.
    """

    def __init__(
        self,
        stack: Stack,
        first: int,
        end: int,
        stream: Stream,
        received: Tensor | None = None,
        *,
        beside: Mapping[int, Values] | None = None,
        still: bool = False,
        training: bool = False,
        taint: bool = False,
        learn: bool = False,
        watch: bool = False,
        marks: Marks | None = None,
    ) -> None:
        self.marks, self.first, self.end = marks, first, end
        self.watch, self._before = watch, cast("Before | None", None)
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
        self.taint, self.still = taint, still
        self.beside: dict[int, Values] = {  # copies, because the step can change them in place
            index: [None if value is None else value.clone() for value in values]
            for index, values in (beside or {}).items()
        }
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
        """Return the block's output or the received hidden state in its form, or raise :class:`StageExit`."""
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
        before = self.stack.beside.before(index, learn=self.learn) if self.active else None
        watch = self.watch and self.active
        if watch and index == self.first:
            self._before = self.stack.beside.before(index, learn=True)
        output = block(*args, **kwargs)
        if watch:
            self.watching(index, output)
        if self.learn:
            self.stack.note(index, output)
            self.feeding.seen(index, args, kwargs, output)
        if before is not None:
            output = self.leaving(index, before, output)
        if self.marks is not None:
            self.marks.left(index, self.beside.get(index, ()))
        self.stream.leave(index)
        return output

    def watching(self, index: int, output: Any) -> None:
        """Refuse tensors that a block left where it left none when places were learnt."""
        hidden, rest = split_output(output)
        self.stack.beside.refuse_new_outputs(index, hidden, rest or ())
        if index == self.end - 1 and self._before is not None:
            self.stack.beside.refuse_new(range(self.first, self.end), self._before, hidden)
            self._before = None

    def leaving(self, index: int, before: Before, output: Any) -> Any:
        """Note what a block left next to its hidden state, and return its output."""
        beside = self.stack.beside
        hidden, rest = split_output(output)
        if self.learn:
            beside.learn(index, before, hidden, rest or ())
        if index not in beside.places:
            return output
        values = self.beside[index] = beside.left(index, before, rest or ())
        if not self.still:
            return output
        zeros = [None if value is None else torch.zeros_like(value) for value in values]
        beside.replace(index, before, zeros)
        others = beside.outputs(index, zeros)
        return (hidden, *(others.get(i, item) for i, item in enumerate(rest, 1))) if rest else output

    def arrive(self, index: int) -> None:
        """Check that the module's code calls each block once, in order, and with gradients if they are needed."""
        who, path = self.stack.who, self.stack.path
        if index != self.expected:
            raise ValueError(
                f"{who}: block {index} of {path!r} was called where block {self.expected} was expected, but pipeline stages"
                " need each step to call every block once, in the order of the stack. Remove the code that repeats, reorders"
                " or skips blocks (layer drop, an extra forward pass in training_step), or name another stack by layers=."
            )
        self.expected += 1
        if self.training and not torch.is_grad_enabled():
            raise ValueError(
                f"{who}: block {index} of {path!r} was called without gradients in a training step, as by a reentrant"
                " checkpoint, so the pipeline stage would lose the gradient of its input. Use"
                " torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )

    def passing(self, index: int, hidden: Tensor) -> Any:
        """Return the output of a skipped block for the input ``hidden``."""
        given = hidden
        if self.passed is not None:
            hidden = self.passed
        elif self.taint:
            hidden = torch.full_like(hidden.detach(), torch.nan)
        self.stream.leave(index)
        values = self.beside.get(index, ())
        others = self.stack.beside.outputs(index, values)
        if self.active:
            self.stack.beside.put(index, values)
        if self.between is not None and self.between.at is None:  # to find where hidden states come from
            known = self.between.before(given)
            if known is not None:
                self.learnt[index] = known
            self.between.after(hidden)
        if index == self.first - 1 and self.active and self.entry is not None:
            if self.origin == RETURNED:
                self._placed = self.entry, version_of(self.entry)
                return self.stack.formed(self.entry, others, taint=self.taint)
            if self.between is not None:
                self.between.after(hidden, self.entry)
        return self.stack.formed(hidden, others, taint=self.taint)

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call of the stage's first block with the received hidden state."""
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
        """Check that a finished step called every block.

        Raises:
            ValueError: if a block was not called.
        """
        if self.expected < len(self.stack.blocks):
            raise ValueError(
                f"{self.stack.who}: the step ended before it called block {self.expected} of {self.stack.path!r}, but pipeline"
                " stages need each step to call every block once. Remove the code that skips blocks (layer drop, an early"
                " return, a bare except around the blocks), or name another stack by layers=."
            )


class StandIn(nn.Module):
    """Replaces a block during one pass, and runs it, skips it or ends the step.

    It belongs to one run and one micro-batch, because a checkpoint can run it again in the backward pass. Its attributes and
    class are the block's, so that it looks like the block to the module's code.
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
        """Return the run's result for the call."""
        return self.__dict__["_run"].call(self.__dict__["_index"], self.__dict__["_block"], args, kwargs)


_PROTOTYPE = StandIn()


@contextmanager
def uncut(
    stack: Stack, stream: Stream, *, learn: bool = False, still: bool = False, marks: Marks | None = None
) -> Iterator[Pass]:
    """Run all blocks with the random numbers of a pipeline."""
    run = Pass(stack, 0, len(stack.blocks), stream, learn=learn, still=still, marks=marks)
    with run.view():
        yield run


def learn_origins(stack: Stack, step: Callable[[Any], Any], batch: Any, stream: Stream) -> None:
    """Find the origin of each block's hidden state in a training step.

    No block runs, so each rank can do this alone. The step's result does not matter.
    """
    end = len(stack.blocks)
    run = Pass(stack, end, end, stream)
    run.between, run.origin = Between(), None
    with rng.fork(), run.view(), suppress(Exception):
        step(batch)
    stack.origins = run.learnt
