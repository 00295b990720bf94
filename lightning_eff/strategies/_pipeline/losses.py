"""Losses of batches to compare with one another: without dropout, batch statistics, low precision or a trace."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core.steps import in_evaluation, silent
from lightning_eff._core.wrapping import unrounded
from lightning_eff.strategies._pipeline.evaluation import through
from lightning_eff.strategies._pipeline.layout import Layout
from lightning_eff.strategies._pipeline.runner import Step, loss_of
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Stack, uncut

Losses = Callable[[Sequence[Any], int], list[float]]
"""``f(batches, seed)`` is the loss of each batch, with random numbers by ``seed``."""


class UncutLosses:
    """The uncut module's loss of each batch in evaluation mode, or with norms and dropout alone in it if it gives none.

    The module is left as it was.

    Args:
        module: the LightningModule.
        stack: its blocks.
        step: runs its training step.
        who: for messages.
    """

    def __init__(self, module: nn.Module, stack: Stack, step: Step, *, who: str) -> None:
        self.module, self.stack, self.step, self.who = module, stack, step, who

    def __call__(self, batches: Sequence[Any], seed: int) -> list[float]:
        every = [*self.module.modules()]
        for modules in (every, [m for m in every if isinstance(m, _NormBase | _DropoutNd)]):
            with in_evaluation(modules):
                found = [self._loss(batch, seed, may_fail=modules is every) for batch in batches]
            told = [loss for loss in found if loss is not None]
            if len(told) == len(found):
                break  # else a step of training that needs training mode
        return told

    def _loss(self, batch: Any, seed: int, *, may_fail: bool) -> float | None:
        with warnings.catch_warnings(), rng.fork(), silent(cast("Any", self.module)), torch.no_grad(), unrounded():
            warnings.simplefilter("ignore")  # a reentrant checkpoint's, that nothing in it wants gradients
            return self.run(batch, Stream(seed, "verify", 0, 0), may_fail=may_fail)

    def run(self, batch: Any, stream: Stream, *, may_fail: bool) -> float | None:
        """The loss, or None if there is none and that may be."""
        try:
            with uncut(self.stack, stream) as run:
                loss = float(loss_of(self.step(batch), who=self.who))
            run.finished()
        except Exception:
            if not may_fail:
                raise
            return None
        return loss


class CutLosses(UncutLosses):
    """The same, of a module that is cut already: collective over the pipeline, every rank of which runs its stages.

    Args:
        where: the stages.
        group: the ranks.
        device: where they run.
    """

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

    @override
    def run(self, batch: Any, stream: Stream, *, may_fail: bool) -> float | None:
        last, reached, loss = self.where.num_stages - 1, [-1], None

        @contextmanager
        def around(stage: int) -> Iterator[None]:
            reached.append(stage)
            yield

        try:
            found = through(
                self.stack,
                self.where,
                self.step,
                batch,
                stream,
                group=self.group,
                device=self.device,
                around=around,
            )
            if reached[-1] == last:
                loss = float(loss_of(found.output, who=self.who))
        except Exception:
            if not may_fail or reached[-1] != last:  # where no other stage waits for this one
                raise
        told = [loss]
        dist.broadcast_object_list(told, group_src=self.where.last_rank, group=self.group)
        return told[0]
