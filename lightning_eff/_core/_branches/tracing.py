"""The graph of what the module's own ``training_step`` computes, from one forward pass beside the run."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core import rng
from lightning_eff._core._branches.graph import Graph, TooLarge
from lightning_eff._core._branches.sharded_step import named, step_of
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core.batches import num_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import in_evaluation, silent


def traced(session: Session, batch: Any, batch_idx: int, *, who: str) -> Graph | None:
    """What the loss of the module's own ``training_step`` on ``batch`` is computed from, in one forward pass.

    The whole plain module runs, in evaluation mode, in the run's precision, and leaves no trace. The cost is counted. None
    for a batch that the step passes over, by returning None.

    Raises:
        ValueError: if the step returns no loss with a graph, or one of too many operations.
    """
    module, chain = session.module, session.chain
    with looked_at(session), named(session) as names:
        output = step_of(session, batch, batch_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        try:
            graph = Graph(loss, module, names) if isinstance(loss, Tensor) and loss.grad_fn is not None else None
        except TooLarge as e:
            raise ValueError(
                f"{who}: training_step has {e}. Name what is to be set, where the technique takes names, or take it out."
            ) from e
    chain.cost.forward_passes += 1
    with suppress(ValueError):  # batches of no tensors have no samples to count
        chain.cost.forward_samples += num_samples(batch)
    if output is None:
        return None
    if graph is None:
        raise ValueError(
            f"{who}: training_step returned {type(loss).__name__} on the first batch; expected a loss with a graph, in which"
            " residual branches are looked for."
        )
    return graph


@contextmanager
def looked_at(session: Session, *, precision: bool = True) -> Iterator[None]:
    """All parameters take gradients, and nothing is compiled, kept or drawn.

    Args:
        session: the run.
        precision: compute in the run's precision; otherwise in that of weights and batch.
    """
    module = session.module
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point() and p.is_leaf]
    with ExitStack() as scope:
        scope.enter_context(torch.enable_grad())
        scope.enter_context(rng.fork())
        scope.enter_context(silent(module))
        scope.enter_context(in_evaluation(module.modules()))
        if precision:
            scope.enter_context(session.trainer.precision_plugin.train_step_context())
        scope.enter_context(uncompiled())
        for p in frozen:
            scope.callback(p.requires_grad_, False)
            p.requires_grad_(True)
        yield
