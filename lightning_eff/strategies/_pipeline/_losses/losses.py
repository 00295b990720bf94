"""Computes losses of batches for comparison, without dropout, batch statistics, low precision or side effects."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core.batches import map_tensors, num_samples
from lightning_eff._core.steps import in_evaluation, silent
from lightning_eff._core.wrapping import unrounded
from lightning_eff.strategies._pipeline._losses.probing import Listening, perturbed
from lightning_eff.strategies._pipeline.evaluation import through
from lightning_eff.strategies._pipeline.layout import Layout
from lightning_eff.strategies._pipeline.runner import loss_of
from lightning_eff.strategies._pipeline.shared_state import Step
from lightning_eff.strategies._pipeline.stack import Stack
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Pass, uncut

_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def raised(module: nn.Module) -> Iterator[None]:
    """Convert 16-bit parameters and buffers to 32 bits until the context ends."""
    before = [(t, t.data) for t in (*module.parameters(), *module.buffers()) if t.dtype in _HALVES]
    default = torch.get_default_dtype()
    try:
        for t, data in before:
            t.data = data.float()
        yield
    finally:
        torch.set_default_dtype(default)
        for t, data in before:
            t.data = data


class UncutLosses:
    """Computes the uncut module's loss of a batch in evaluation mode.

    If the module has no loss in that mode, only its norms and dropout are in evaluation mode. A sample's random numbers do not
    depend on the other samples. The module does not change.

    Args:
        module: the LightningModule.
        stack: its blocks.
        step: runs its training step.
        who: name of the caller in messages.

    Attributes:
        seen: numbers with which the step compares tensors.
        eps: rounding error of a loss, relative to 1 or to the loss.
        still: whether blocks leave zeros next to their hidden states, so that these do not change the loss.
        may_fail_anywhere: whether a step can raise in a block without blocking other ranks.
    """

    may_fail_anywhere = True

    def __init__(self, module: nn.Module, stack: Stack, step: Step, *, who: str) -> None:
        self.module, self.stack, self.step, self.who = module, stack, step, who
        self.seen: dict[float, None] = {}
        self.still = False
        self._modules: list[nn.Module] | None = None
        self._raised = any(p.dtype in _HALVES for p in module.parameters())
        self._inside = {id(p) for block in stack.blocks for p in block.parameters()}

    @property
    def eps(self) -> float:
        dtypes = {t.dtype for t in self.module.parameters() if t.is_floating_point()} | {torch.float32}
        if self._raised:
            dtypes -= {*_HALVES}
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    def start(self, batch: Any) -> float:
        """Compute the loss of ``batch`` through all blocks, and find out how to run other batches."""
        every = [*self.module.modules()]
        few: list[nn.Module] = [m for m in every if isinstance(m, _NormBase | _DropoutNd)]
        ways = [(modules, up) for up in ((True, False) if self._raised else (False,)) for modules in (every, few)]
        for self._modules, self._raised in ways:
            last = (self._modules, self._raised) == ways[-1]
            with self.at():
                found = self.loss(batch, may_fail=not last)
            if found is not None:
                return found
        raise AssertionError("the last way may not fail")

    @contextmanager
    def at(self, amount: float = 0.0) -> Iterator[None]:
        """Return the context of :meth:`loss`, with modes and, by ``amount``, other weights outside the blocks."""
        assert self._modules is not None
        with (
            in_evaluation(self._modules),
            warnings.catch_warnings(),
            rng.fork(),
            torch.no_grad(),
            unrounded(),
            perturbed(self.module, self._inside, amount),
            torch.compiler.set_stance("force_eager"),
        ):
            warnings.simplefilter("ignore")  # a reentrant checkpoint warns that nothing in it needs gradients
            yield

    def loss(
        self,
        batch: Any,
        seed: int = 0,
        *,
        rows: tuple[int, int] | None = None,
        may_fail: bool = False,
        blocks: bool = True,
    ) -> float | None:
        """Return the loss of ``batch``, or None if it has none and ``may_fail`` is set.

        Args:
            batch: the batch.
            seed: seed of the random numbers.
            rows: number of the first sample, and the number of all samples; they decide each sample's random numbers.
            may_fail: whether the step may fail.
            blocks: run the blocks. False skips them, in this process only.
        """
        size = num_samples(batch)
        mode = Listening(size, *(rows or (0, size)))
        stream = Stream(seed, "verify", 0, 0)
        with silent(cast("Any", self.module)):
            if blocks:
                found = self.run(batch, stream, mode, may_fail=may_fail)
            else:
                found = self._past(batch, stream, mode, may_fail=may_fail)
        self.seen |= mode.seen
        return found

    def _called(self, batch: Any, mode: Listening) -> Any:
        if not self._raised:
            with mode:
                return self.step(batch)
        higher = map_tensors(batch, lambda t: t.float() if t.dtype in _HALVES else t)
        with raised(self.module), mode:
            return self.step(higher)

    def run(self, batch: Any, stream: Stream, mode: Listening, *, may_fail: bool) -> float | None:
        """Return the loss through all blocks, or None if there is none and ``may_fail`` is set."""

        def inside() -> Any:
            with uncut(self.stack, stream, learn=self.stack.form is None, still=self.still) as run:
                output = self._called(batch, mode)
            run.finished()
            return output

        return self._tried(inside, may_fail=may_fail)

    def _past(self, batch: Any, stream: Stream, mode: Listening, *, may_fail: bool) -> float | None:
        """Return the loss of a step whose blocks return their input."""

        def inside() -> Any:
            end = len(self.stack.blocks)
            run = Pass(self.stack, end, end, stream)
            with run.view():
                output = self._called(batch, mode)
            run.finished()
            return output

        return self._tried(inside, may_fail=may_fail)

    def _tried(self, inside: Any, *, may_fail: bool) -> float | None:
        try:
            found: Tensor = loss_of(inside(), who=self.who)
            return float(found)
        except Exception:
            if not may_fail:
                raise
            return None


class CutLosses(UncutLosses):
    """Computes the losses of a module after the cut; collective over the pipeline, whose ranks run their stages.

    Args:
        where: the layout.
        group: the pipeline ranks.
        device: device for messages.
    """

    may_fail_anywhere = False

    def __init__(
        self,
        module: nn.Module,
        stack: Stack,
        step: Step,
        where: Layout,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        who: str,
    ) -> None:
        super().__init__(module, stack, step, who=who)
        self.where, self.group, self.device = where, group, device
        self._raised = False

    @override
    def run(self, batch: Any, stream: Stream, mode: Listening, *, may_fail: bool) -> float | None:
        last, reached, loss = self.where.num_stages - 1, [-1], None

        @contextmanager
        def around(stage: int) -> Iterator[None]:
            reached.append(stage)
            yield

        try:
            found = through(
                self.stack,
                self.where,
                lambda batch: self._called(batch, mode),
                batch,
                stream,
                group=self.group,
                device=self.device,
                still=self.still,
                around=around,
            )
            if reached[-1] == last:
                loss = float(loss_of(found.output, who=self.who))
        except Exception:
            if not may_fail or reached[-1] != last:  # the last stage can fail, since no stage waits for it
                raise
        told: list[Any] = [(loss, self.seen | mode.seen)]
        dist.broadcast_object_list(told, group_src=self.where.last_rank, group=self.group)
        loss, mode.seen = told[0]
        return loss
