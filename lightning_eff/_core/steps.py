"""The step chain: one wrapper on the instance's ``training_step``, to which each technique adds a link at a stage."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_eff._core import rng

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Stage(IntEnum):
    """Where a link acts; a smaller stage wraps the larger ones, whatever the order of the callbacks."""

    CHOOSE = 1  #: choose samples
    TRANSFORM = 2  #: change the batch: length, resolution, tokens, mixing
    PERTURB = 3  #: run at other weights
    REWEIGHT = 4  #: change the loss


Proceed = Callable[[Any], Any]


class Link(Protocol):
    """One technique's part of a training step."""

    def __call__(self, step: "Step", batch: Any, proceed: Proceed) -> Any:
        """Return what ``training_step`` shall return; ``proceed(batch)`` runs the rest of the chain."""
        ...


@dataclass
class Cost:
    """What the extra passes of a run cost: beyond the one forward and backward pass of each plain step."""

    forward_passes: int = 0
    forward_samples: int = 0
    backward_passes: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, float]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.__dict__.update(state)


@contextmanager
def silent(module: "LightningModule") -> Iterator[None]:
    """Run a pass that leaves no trace: ``self.log`` is muted, buffers and metrics are put back afterwards.

    Buffers are put back without a version bump, since a backward pass through this pass may still come. The autocast
    cache is emptied on both ends: it would serve weights cast before they changed, or cast without a graph.
    """
    namespace = module.__dict__
    had, old = "log" in namespace, namespace.get("log")
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    metrics = [(m, m._copy_state_dict(), m._update_count, m._computed) for m in module.modules() if isinstance(m, Metric)]
    namespace["log"] = _ignore
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        if had:
            namespace["log"] = old
        else:
            del namespace["log"]
        for buffer, value in buffers:
            buffer.data.copy_(value)
        for metric, state, count, computed in metrics:
            metric._restore_cache(state)
            metric._update_count, metric._computed = count, computed


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stands in for ``LightningModule.log`` in a silent pass."""


@dataclass
class Step:
    """One call of ``training_step``, as its links see it.

    Attributes:
        module: the LightningModule.
        rest: what ``training_step`` takes after the batch (the batch's index), if anything.
        batch_idx: the index of the batch in its epoch.
        global_step: optimizer steps done before this one.
    """

    chain: "StepChain"
    module: "LightningModule"
    rest: tuple[Any, ...]
    batch_idx: int
    global_step: int

    def forward_only(self, batch: Any, size: int, mode: Any = None) -> Any:
        """Run the user's step on ``batch`` of ``size`` samples for its loss alone, under ``mode`` if given.

        No graph, no log, no change to buffers, metrics or the global random state; the batch passes through the links that
        transform it, not those that choose or perturb. The cost is counted.
        """
        start = time.perf_counter()
        with torch.no_grad(), rng.fork(), silent(self.module):
            output = self.chain.call(self, batch, stages=(Stage.TRANSFORM,), mode=mode)
        self.chain.cost.forward_passes += 1
        self.chain.cost.forward_samples += size
        self.chain.cost.seconds += time.perf_counter() - start
        return output


@dataclass
class StepChain:
    """The links of a run, in the order of their stages, around the original ``training_step``."""

    original: Callable[..., Any]
    links: list[tuple[Stage, Link]] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)

    def add(self, stage: Stage, link: Link) -> None:
        """Add a link; links of one stage wrap each other in the order they came."""
        self.links.append((stage, link))
        self.links.sort(key=lambda item: item[0])

    def run(self, step: Step, batch: Any) -> Any:
        """The training step: all links, then the user's own."""
        return self.call(step, batch, stages=tuple(Stage))

    def call(self, step: Step, batch: Any, *, stages: tuple[Stage, ...], mode: Any = None) -> Any:
        """The user's step on ``batch`` behind the links of ``stages``, the innermost call under ``mode``."""

        def proceed_from(position: int) -> Proceed:
            def proceed(batch: Any) -> Any:
                for index in range(position, len(self.links)):
                    stage, link = self.links[index]
                    if stage in stages:
                        return link(step, batch, proceed_from(index + 1))
                if mode is None:
                    return self.original(batch, *step.rest)
                with mode:
                    return self.original(batch, *step.rest)

            return proceed

        return proceed_from(0)(batch)


def trainable(module: nn.Module) -> list[Tensor]:
    """The parameters that take gradients, each once."""
    return [p for p in module.parameters() if p.requires_grad]
