"""What PyTorch's PipelineStage runs: the user's own step on one micro-batch, with one stage's blocks in place."""

import traceback
from collections.abc import Iterator
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

_WRITTEN = "refers to a single memory location"  # torch, of tensors whose elements are one: those that were let go of


def left(run: Pass, step: Step, batch: Any) -> tuple[Any, bool]:
    """Run the step as one stage sees it.

    Returns:
        The hidden state with which it was left and True; or, on the last stage, what it returned and False.

    Raises:
        ValueError: if the step writes to what this rank let go of.
    """
    with run.view():
        try:
            output = step(batch)
        except StageExit as leaving:
            traceback.clear_frames(leaving.__traceback__)  # they hold what the user's step had computed
            return leaving.hidden, True
        except RuntimeError as error:
            if _WRITTEN not in str(error):
                raise
            raise ValueError(
                f"{run.stack.who}: the step writes to a parameter that another pipeline rank holds, as where it scales its"
                " blocks' weights from outside; expected that blocks alone change what is theirs. Do so in the blocks' own"
                " forward, or in the optimizer, or take pipeline_parallel_size=1."
            ) from error
    run.finished()
    return output, False


def loss_of(output: Any, *, who: str) -> Tensor:
    """The loss in what ``training_step`` returned: itself, or the entry ``"loss"``; of shape ().

    Raises:
        ValueError: if there is none, or if it is not one number with a gradient.
    """
    loss = output
    if not isinstance(output, Tensor) and hasattr(output, "get"):
        loss = output.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        raise ValueError(
            f"{who}: training_step returned {what}; expected the loss, a tensor of one element, or a dict with it under"
            " 'loss'. In a pipeline no micro-batch can be left out by returning None: return a loss of zero weight."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            f"{who}: training_step returned a loss without a gradient; expected one that depends on trained parameters."
            " Take out what detaches it (.detach(), .item(), torch.no_grad)."
        )
    return loss if loss.ndim == 0 else loss.reshape(())


class Stage(PipelineStage):
    """PyTorch's stage, whose backward passes see the blocks as the forward pass of their micro-batch did."""

    submod: "StageRunner"

    @override
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.submod.again(bwd_chunk_id, last=full_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    @override
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.submod.again(bwd_chunk_id, last=True):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class StageRunner(nn.Module):
    """The submodule of a torch ``PipelineStage``.

    Args:
        ground: what the pipeline is cut from.
        course: how far its passes are.
        stage: its index.
        blocks: the stage's own blocks.
        whole: the module, for a rank's only stage.
        buffers: the rank's buffers outside the blocks.
        leavings: what the last stage's passes leave in the module.
        outside: the rank's parameters outside its blocks.

    Attributes:
        stage: its index.
        blocks: the stage's own blocks.
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
        if whole is not None:  # the rank's only stage: a root over all that the rank holds
            self.module = whole
        else:
            self.owned = nn.ModuleList(blocks)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All parameters that the stage may give gradients to: PyTorch's split backward looks them up here."""
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
        """The view of a micro-batch's forward pass; after its ``last`` backward pass it is let go of."""
        running = self._course.running
        assert running is not None
        self._course.part = mb, len(running.microbatches)
        with running.passes[self.stage, mb].again():
            yield
        if last:
            del running.passes[self.stage, mb]

    def forward(self, *received: Tensor, mb: Tensor) -> Tensor:
        """One micro-batch.

        Args:
            received: the hidden state from the stage before; nothing on the first.
            mb: its index, shape (1,).

        Returns:
            The hidden state for the stage after; on the last, the loss, shape ().
        """
        running = self._course.running
        assert running is not None
        try:
            return self._forward(running, received[0] if received else None, int(mb))
        except BaseException as error:
            running.failure = error
            raise

    def _forward(self, running: Running, received: Tensor | None, mb: int) -> Tensor:
        where, who, stack = self._ground.layout, self._ground.who, self._ground.stack
        first, end = where.bounds[self.stage]
        is_last = self.stage == where.num_stages - 1
        stream = Stream(self._course.seed, "train", running.number, mb)
        run = Pass(stack, first, end, stream, received, training=True)
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
        shape, dtype = running.likes[self.stage]
        if tuple(output.shape) != shape or output.dtype != dtype:
            raise ValueError(
                f"{who}: micro-batch {mb} left stage {self.stage} (before block {end} of {stack.path!r}) with a"
                f" hidden state of shape {tuple(output.shape)} and type {output.dtype}; the stages are set up for"
                f" {shape} and {dtype}, as the first micro-batch had it. Expected micro-batches whose hidden states have"
                " one shape: pad all samples of a batch to one length before training_step, and drop no tokens by chance."
            )
        # it is sent, and PyTorch's split backward detaches it in place, which a view does not allow
        return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()
