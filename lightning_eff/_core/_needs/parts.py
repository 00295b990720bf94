"""What a session knows of a strategy under which no process has the whole module, or the whole batch."""

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
    """Part of a session; outside of pipelines a batch has one part, and each process computes its loss."""

    trainer: Trainer
    module: LightningModule
    chain: StepChain
    _stepping: Any  # whose training_step the links stand around
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
        """Whether this process computes the loss of training steps: in a pipeline, those of the last stage do."""
        return not self.divided or self._pipeline.sees_loss

    @property
    def part(self) -> tuple[int, int]:
        """Which equal part of the batch the module's step has at the moment, and of how many: in a pipeline, a micro-batch."""
        return self._pipeline.part if self.divided else (0, 1)

    @property
    def share_of_part(self) -> float:
        """What the loss of :attr:`part` is multiplied by in the batch's."""
        return self._pipeline.share_of_part if self.divided else 1.0

    def weights_of_parts(self, batch: Any) -> list[float] | None:
        """What the losses of a pipeline's micro-batches are multiplied by in this batch's; None if it is their mean."""
        return self._pipeline.weights_of(batch)

    def weigh_parts(self, *, evenly: bool) -> None:
        """Let the loss of a pipeline's next batch be the mean of its micro-batches', whatever counts in them."""
        self._pipeline.evenly = evenly

    def from_loss(self, value: T) -> T:
        """In a pipeline, the value of the process that computes the loss; collective."""
        return self._pipeline.from_loss(value) if self.divided else value

    def told_by_loss(self, owner: Any, *names: str) -> None:
        """In a pipeline, let these attributes, numbers, be those of the process that computes the loss, after each pass.

        Called in ``attach``.
        """
        self._told += [(owner, name) for name in names]

    def begin_telling(self) -> None:
        """The strategy is set up."""
        self._pipeline.told.extend(self._told)

    @property
    def own_step(self) -> Callable[..., Any]:
        """The module's own ``training_step``, which no link stands around."""
        return self.module.training_step if self.divided else self.chain.original

    @property
    def apart_step(self) -> Callable[..., Any]:
        """As :attr:`own_step`, for passes without a graph, which all ranks of a pipeline make at once."""
        return self.trainer.strategy.forward_step if self.divided else self.own_step  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around passes without a graph that the strategy does not call: what FSDP2 keeps in pieces is whole for them.

        As many passes must be made on each rank. In a pipeline, :attr:`apart_step` sees to that by itself.
        """
        fsdp, model = sys.modules.get("torch.distributed.fsdp"), self.trainer.strategy.model
        kind = () if fsdp is None or self.divided else fsdp.FSDPModule
        trees = [self.module, *([] if model is None else [model])]
        found: dict[int, Any] = {id(m): m for tree in trees for m in tree.modules() if isinstance(m, kind)}
        top = found.get(id(model))
        if top is not None:  # its own call, which these passes do without, would put together what lies in no block
            top.unshard()
        try:
            yield
        finally:
            for m in found.values():
                m.reshard()

    def standing(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The module's own step inside what the strategy puts around it (its ``around_own_step``, if it has one)."""
        around = getattr(self.trainer.strategy, "around_own_step", None)
        if around is None or self.divided:
            return step

        @functools.wraps(step)
        def own(*args: Any, **kwargs: Any) -> Any:
            with around():
                return step(*args, **kwargs)

        own.__wrapped__ = inspect.unwrap(step)  # Lightning looks through one wrapper only
        return own
