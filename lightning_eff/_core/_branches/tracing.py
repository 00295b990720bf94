"""The graph of the module's own ``training_step``, from one forward pass separate from the run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_eff._core._architecture.updates import without_updates
from lightning_eff._core._branches.graph import Graph, TooLarge
from lightning_eff._core._branches.probing import aside
from lightning_eff._core._branches.sharded_step import named, step_of
from lightning_eff._core.session import Session
from lightning_eff._core.steps import looking_on


def traced(session: Session, batch: Any, batch_idx: int, *, who: str) -> Graph | None:
    """Return the graph of the loss of the module's own ``training_step`` on ``batch``, in one forward pass.

    The whole plain module runs in evaluation mode, in the run's precision, without a trace. The cost is counted. The result is
    None for a batch that the step skips by returning None. Under manual optimization, the loss is the sum of those that the
    step differentiates, and nothing is updated.

    Raises:
        ValueError: if the step gives no loss with a graph, or one with too many operations.
    """
    module, chain = session.module, session.chain
    with looked_at(session), named(session) as names, _differentiated(module) as losses:
        output = step_of(session, batch, batch_idx)
        if not module.automatic_optimization:
            if not losses:
                raise ValueError(
                    f"{who}: training_step called self.manual_backward on no loss of the first batch, so there is no graph to"
                    f" look at. Call it there, or remove {who}."
                )
            output = torch.stack([loss.sum() for loss in losses]).sum()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        try:
            graph = Graph(loss, module, names) if isinstance(loss, Tensor) and loss.grad_fn is not None else None
        except TooLarge as e:
            raise ValueError(
                f"{who}: training_step has {e}. Name the layers, if {who} has an argument for this, or remove {who}."
            ) from e
    chain.cost.add(batch)
    if output is None:
        return None
    if graph is None:
        raise ValueError(
            f"{who}: training_step returned {type(loss).__name__} on the first batch; expected a loss with a graph, to find"
            " residual branches in it."
        )
    return graph


@contextmanager
def _differentiated(module: LightningModule) -> Iterator[list[Tensor]]:
    """Collect the losses of ``manual_backward`` calls under manual optimization, and let the step update nothing."""
    found: list[Tensor] = []
    if module.automatic_optimization:
        yield found
        return
    with without_updates(module, backward=lambda loss, *args, **kwargs: found.append(loss)):
        yield found


@contextmanager
def looked_at(session: Session, *, precision: bool = True) -> Iterator[None]:
    """Give all parameters gradients, disable compilation, and restore logs and random state.

    Args:
        session: the run.
        precision: compute in the run's precision; otherwise in that of weights and batch.
    """
    context = session.trainer.precision_plugin.train_step_context() if precision else nullcontext()
    with aside(session.module), looking_on(), context:
        yield
