"""The submodule of PyTorch's PipelineStage, which runs the user's step on one micro-batch with one stage's blocks."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

from lightning_eff.strategies._pipeline._everywhere.step_effects import Leavings
from lightning_eff.strategies._pipeline.shared_state import Course, Ground, OuterBuffers, OuterParameters, Running, Step
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Pass, StageExit

_WRITTEN = (
    "refers to a single memory location"  # torch's message for tensors with the memory of one element, which were freed
)


def left(run: Pass, step: Step, batch: Any) -> tuple[Any, bool]:
    """Run the step with the blocks of one stage.

    Returns:
        The stage's hidden state and True, or on the last stage the step's result and False.

    Raises:
        ValueError: if the step writes to a parameter that this rank freed.
    """
    with run.view():
        try:
            output = step(batch)
        except StageExit as leaving:
            traceback.clear_frames(leaving.__traceback__)  # they hold tensors of the user's step
            return leaving.hidden, True
        except RuntimeError as error:
            if _WRITTEN not in str(error):
                raise
            raise ValueError(
                f"{run.stack.who}: the step writes to a parameter that another pipeline rank holds, such as a block's weight."
                " Change it in the block's forward or in the optimizer, or use pipeline_parallel_size=1."
            ) from error
    run.finished()
    return output, False


def loss_of(output: Any, *, who: str) -> Tensor:
    """Return the loss, of shape (), from the result of ``training_step``: a tensor, or the entry ``"loss"`` of a dict.

    Raises:
        ValueError: if there is no loss, or it is not one number with a gradient.
    """
    loss = output
    if not isinstance(output, Tensor) and hasattr(output, "get"):
        loss = output.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        raise ValueError(
            f"{who}: training_step returned {what}; expected the loss, a tensor of one element, or a dict with it under"
            " 'loss'. A pipeline cannot skip a micro-batch by returning None. Return a loss of zero weight instead."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            f"{who}: training_step returned a loss without a gradient; expected one that depends on trained parameters."
            " Remove the code that detaches it (.detach(), .item(), torch.no_grad)."
        )
    return loss if loss.ndim == 0 else loss.reshape(())


class Stage(PipelineStage):
    """PyTorch's stage, with the same blocks in a micro-batch's backward pass as in its forward pass."""

    submod: "StageRunner"

    @override
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        inputs = self.fwd_cache[bwd_chunk_id][1]
        with self.submod.again(bwd_chunk_id, last=full_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        grads = self.bwd_cache.get(bwd_chunk_id)
        if grads is not None and any(grad is None for grad in grads):  # for torch that sends no zeros itself
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(value) if grad is None else grad for grad, value in zip(grads, inputs, strict=False)
            )

    @override
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.submod.again(bwd_chunk_id, last=True):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class StageRunner(nn.Module):
    """The submodule of a torch ``PipelineStage``.

    Args:
        ground: the module and its layout.
        course: the progress of the passes.
        stage: index of the stage.
        blocks: the stage's blocks.
        whole: the module, for a rank's only stage.
        buffers: the rank's buffers outside the blocks.
        leavings: shares the effects of the last stage's passes.
        outside: the rank's parameters outside its blocks.

    Attributes:
        stage: index of the stage.
        blocks: the stage's blocks.
    """

    blocks: list[nn.Module]

    def __init__(
        self,
        ground: Ground,
        course: Course,
        stage: int,
        blocks: list[nn.Module],
        *,
        whole: nn.Module | None,
        buffers: OuterBuffers,
        leavings: Leavings,
        outside: OuterParameters,
    ) -> None:
        super().__init__()
        self._ground, self._course = ground, course
        self._outer, self._leavings, self._outside = buffers, leavings, outside
        self.__dict__["blocks"] = blocks  # not registered here: see below
        self.stage = stage
        if whole is not None:  # the rank's only stage is the root of all that the rank holds
            self.module = whole
        else:
            self.owned = nn.ModuleList(blocks)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield all parameters that can get gradients from the stage, for PyTorch's split backward pass."""
        if not recurse or "owned" not in self._modules:
            yield from super().parameters(recurse)
            return
        seen: set[int] = set()
        for p in (*super().parameters(), *self._outside):
            if id(p) not in seen:
                seen.add(id(p))
                yield p

    @contextmanager
    def again(self, mb: int, *, last: bool) -> Iterator[None]:
        """Restore the view of a micro-batch's forward pass, and drop it after its ``last`` backward pass."""
        running = self._course.running
        assert running is not None
        self._course.part = mb, len(running.microbatches)
        with running.passes[self.stage, mb].again():
            yield
        if last:
            del running.passes[self.stage, mb]

    def forward(self, *received: Tensor, mb: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run one micro-batch.

        Args:
            received: the hidden state from the stage before, and what earlier blocks left beside theirs; nothing on the first
                stage.
            mb: index of the micro-batch, shape (1,).

        Returns:
            The same for the next stage, or on the last stage the loss, shape ().
        """
        running = self._course.running
        assert running is not None
        try:
            return self._forward(running, received, int(mb))
        except BaseException as error:
            running.failure = error
            raise

    def _forward(self, running: Running, received: Sequence[Tensor], mb: int) -> Tensor | tuple[Tensor, ...]:
        where, who, stack = self._ground.layout, self._ground.who, self._ground.stack
        first, end = where.bounds[self.stage]
        is_last = self.stage == where.num_stages - 1
        stream = Stream(self._course.seed, "train", running.number, mb)
        beside = stack.beside.by_block(received[1:], first)
        hidden, watch = received[0] if received else None, mb == 0
        run = Pass(stack, first, end, stream, hidden, beside=beside, training=True, watch=watch)
        running.passes[self.stage, mb] = run
        self._course.part = mb, len(running.microbatches)
        put_back = self._outer.put(self.stage)
        try:
            with running.recorders.recorded(self.stage), nullcontext() if is_last else self._leavings.kept():
                output, exited = left(run, running.step, running.microbatches[mb])
        finally:
            put_back()
        if not exited:
            loss = loss_of(output, who=who)
            running.losses[mb] = loss.detach().clone()
            return loss
        stack.beside.refuse_missing(run.beside, end)
        left_beside = stack.beside.flat(run.beside, end)
        expected = running.likes[self.stage]
        for value, (shape, dtype) in zip((output, *left_beside), expected, strict=True):
            assert value is not None
            if tuple(value.shape) == shape and value.dtype == dtype:
                continue
            what = "hidden state" if value is output else f"tensor for {stack.beside}"
            raise ValueError(
                f"{who}: micro-batch {mb} left stage {self.stage} (before block {end} of {stack.path!r}) with a"
                f" {what} of shape {tuple(value.shape)} and type {value.dtype}, but the first micro-batch had"
                f" {shape} and {dtype}. Pad all samples of a batch to one length before training_step, and do not drop tokens"
                " at random."
            )
        more = [_sendable(value) for value in left_beside if value is not None]
        return (_sendable(output), *more) if more else _sendable(output)


def _sendable(value: Tensor) -> Tensor:
    # PyTorch's split backward pass detaches the sent tensor in place, which a view does not allow
    return value.clone(memory_format=torch.contiguous_format) if value._is_view() else value.contiguous()
