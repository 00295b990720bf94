"""What PyTorch's PipelineStage runs: the user's own step on one micro-batch, with one stage's blocks in place."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

from lightning_eff.strategies._pipeline.logging import Recorders, metrics_kept
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Like, Pass, StageExit

if TYPE_CHECKING:
    from lightning_eff.strategies._pipeline.pipeline import Pipeline

Step = Callable[[Any], Any]

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


@dataclass
class Running:
    """One training pass.

    Attributes:
        scale: what the batch's loss is multiplied by before the backward passes.
        weights: of the micro-batches' losses in it, summing to 1; None if they are all the same.
        likes: shape and type of the hidden state between stages ``s`` and ``s + 1``.
        passes: by stage and micro-batch, those whose backward pass is still to come.
    """

    step: Step
    microbatches: list[Any]
    number: int
    scale: Any
    weights: list[float] | None
    likes: dict[int, Like]
    recorders: Recorders
    losses: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[tuple[int, int], Pass] = field(default_factory=dict)
    failure: BaseException | None = None

    def factor(self, microbatch: int) -> Any:
        """What that micro-batch's loss is multiplied by."""
        return self.scale * (1 / len(self.microbatches) if self.weights is None else self.weights[microbatch])


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


class OuterBuffers:
    """Buffers outside the blocks, for a rank of several stages: each stage's passes see and change its own.

    The code outside the blocks runs once for each stage, and would count every micro-batch twice (a BatchNorm before
    the stack). The buffers that are seen outside of training passes are those of the rank's last stage.
    """

    def __init__(self, module: nn.Module, blocks: list[nn.Module], stages: list[int]) -> None:
        inside = {id(m) for block in blocks for m in block.modules()}
        self._owners = [m for m in module.modules() if id(m) not in inside and m._buffers]
        self._copies: dict[int, list[dict[str, Tensor | None]]] = {}
        self._stages = stages

    def put(self, stage: int) -> Callable[[], None]:
        """Show ``stage`` its own buffers; returns what shows the module's again."""
        if len(self._stages) < 2 or stage == self._stages[-1] or not self._owners:
            return lambda: None
        if stage not in self._copies:
            self._copies[stage] = [
                {name: None if b is None else b.detach().clone() for name, b in m._buffers.items()}
                for m in self._owners
            ]
        before = [m._buffers for m in self._owners]
        for m, buffers in zip(self._owners, self._copies[stage], strict=True):
            m._buffers = buffers

        def put_back() -> None:
            for m, buffers in zip(self._owners, before, strict=True):
                m._buffers = buffers

        return put_back

    def forget(self) -> None:
        """Begin anew from the module's buffers (they were loaded, or changed outside of training passes)."""
        self._copies.clear()


class StageRunner(nn.Module):
    """The submodule of a torch ``PipelineStage``.

    Attributes:
        stage: its index.
        blocks: the stage's own blocks.
    """

    blocks: list[nn.Module]

    def __init__(self, pipeline: "Pipeline", stage: int, blocks: list[nn.Module], *, whole: nn.Module | None) -> None:
        super().__init__()
        self.__dict__["_pipeline"] = pipeline
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
        for p in (*super().parameters(), *self.__dict__["_pipeline"].outer_parameters()):
            if id(p) not in seen:
                seen.add(id(p))
                yield p

    @contextmanager
    def again(self, mb: int, *, last: bool) -> Iterator[None]:
        """The view of a micro-batch's forward pass; after its ``last`` backward pass it is let go of."""
        running = self.__dict__["_pipeline"].running
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
        pipeline: Pipeline = self.__dict__["_pipeline"]
        running = pipeline.running
        assert running is not None
        try:
            return self._forward(pipeline, running, received[0] if received else None, int(mb))
        except BaseException as error:
            running.failure = error
            raise

    def _forward(self, pipeline: "Pipeline", running: Running, received: Tensor | None, mb: int) -> Tensor:
        where, who = pipeline.layout, pipeline.who
        first, end = where.bounds[self.stage]
        is_last = self.stage == where.num_stages - 1
        stream = Stream(pipeline.seed, "train", running.number, mb)
        run = Pass(pipeline.stack, first, end, stream, received, training=True)
        running.passes[self.stage, mb] = run
        put_back = pipeline.outer_buffers.put(self.stage)
        try:
            with running.recorders.recorded(self.stage), metrics_kept(() if is_last else pipeline.metrics):
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
                f"{who}: micro-batch {mb} left stage {self.stage} (before block {end} of {pipeline.stack.path!r}) with a"
                f" hidden state of shape {tuple(output.shape)} and type {output.dtype}; the stages are set up for"
                f" {shape} and {dtype}, as the first micro-batch had it. Expected micro-batches whose hidden states have"
                " one shape: pad all samples of a batch to one length before training_step, and drop no tokens by chance."
            )
        # it is sent, and PyTorch's split backward detaches it in place, which a view does not allow
        return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()
