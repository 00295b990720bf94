"""The part of a session for strategies under which no process has the whole module, or the whole batch."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer

from lightning_eff._core.steps import StepChain

T = TypeVar("T")


class Parts:
    """Part of a session. Outside of pipelines a batch has one part, and each process computes its loss."""

    trainer: Trainer
    module: LightningModule
    chain: StepChain
    _stepping: Any  # the object whose training_step the links wrap
    _told: list[tuple[Any, str]]

    @property
    def divided(self) -> bool:
        """Whether a pipeline runs the module's step on micro-batches, with some of its blocks in each process."""
        return self._stepping is not self.module

    @property
    def _pipeline(self) -> Any:
        return self.trainer.strategy.pipeline  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def sees_loss(self) -> bool:
        """Whether this process computes the loss of training steps. In a pipeline, only the last stage does."""
        return not self.divided or self._pipeline.sees_loss

    @property
    def part(self) -> tuple[int, int]:
        """The index and number of equal parts of the batch that the module's step runs on: in a pipeline, its micro-batch."""
        return self._pipeline.part if self.divided else (0, 1)

    @property
    def share_of_part(self) -> float:
        """The factor of the loss of :attr:`part` in the batch's loss."""
        return self._pipeline.share_of_part if self.divided else 1.0

    def weights_of_parts(self, batch: Any) -> list[float] | None:
        """Return the factors of a pipeline's micro-batch losses in this batch's loss; None if it is their mean."""
        return self._pipeline.weights_of(batch)

    def weigh_parts(self, *, evenly: bool) -> None:
        """Make the loss of a pipeline's next batch the plain mean of its micro-batches' losses, if ``evenly``."""
        self._pipeline.evenly = evenly

    def from_loss(self, value: T) -> T:
        """Return, in a pipeline, the value of the process that computes the loss. Collective."""
        return self._pipeline.from_loss(value) if self.divided else value

    def told_by_loss(self, owner: Any, *names: str) -> None:
        """Copy these numeric attributes from the process that computes a pipeline's loss after each pass.

        Call it in ``attach``.
        """
        self._told += [(owner, name) for name in names]

    def begin_telling(self) -> None:
        """Start copying the attributes of :meth:`told_by_loss` when the strategy is set up."""
        self._pipeline.told.extend(self._told)

    @property
    def own_step(self) -> Callable[..., Any]:
        """The module's own ``training_step``, without links."""
        return self.module.training_step if self.divided else self.chain.original

    @property
    def apart_step(self) -> Callable[..., Any]:
        """As :attr:`own_step`, for passes without a graph, which all ranks of a pipeline run together."""
        return self.trainer.strategy.forward_step if self.divided else self.own_step  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Gather FSDP2's sharded parameters for passes without a graph that the strategy does not run.

        Each rank must run as many passes. In a pipeline, :attr:`apart_step` gathers them itself.
        """
        fsdp, model = sys.modules.get("torch.distributed.fsdp"), self.trainer.strategy.model
        kind = () if fsdp is None or self.divided else fsdp.FSDPModule
        trees = [self.module, *([] if model is None else [model])]
        found: dict[int, Any] = {id(m): m for tree in trees for m in tree.modules() if isinstance(m, kind)}
        top = found.get(id(model))
        if top is not None:  # these passes skip its forward, which would gather the parameters outside blocks
            top.unshard()
        try:
            yield
        finally:
            for m in found.values():
                m.reshard()

    def standing(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the module's own step in the strategy's ``around_own_step``, if it has one."""
        around = getattr(self.trainer.strategy, "around_own_step", None)
        if around is None or self.divided:
            return step

        @functools.wraps(step)
        def own(*args: Any, **kwargs: Any) -> Any:
            with around():
                return step(*args, **kwargs)

        own.__wrapped__ = inspect.unwrap(step)  # Lightning unwraps only once
        return own
