"""Forward passes of the user's ``training_step`` over training data, separate from the running epoch."""

import copy
import itertools
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core._run.loader_copies import apart
from lightning_eff._core.patches import hook_before
from lightning_eff._core.session import Session
from lightning_eff._core.steps import in_evaluation, silent, takes_index


def forward_over_training_data(session: Session, num_batches: int | None, *, epoch: int) -> int:
    """Run the module's own ``training_step`` forward-only on batches of the training loader.

    The running iteration, its samplers and the global random state do not change. The batches and random draws depend only on
    the run's seed and ``epoch``. Other techniques' links do not run, and blocks are shown as in evaluation. The cost is
    counted. The caller must protect logs, buffers and metrics with :func:`steps.silent`.

    Args:
        session: the run.
        num_batches: the number of batches on each rank; None uses the whole epoch.
        epoch: the epoch given to samplers, and the key of the random draws.

    Returns:
        The number of batches used.

    Raises:
        ValueError: if ``num_batches`` is None and the loader has no length.
    """
    cost, index = session.chain.cost, -1
    with_index = takes_index(session.own_step)
    training_step = session._evaluation(session.own_step)
    start = time.perf_counter()
    with torch.inference_mode(False), torch.no_grad():
        for index, batch in enumerate(training_batches(session, num_batches, epoch=epoch)):
            with session.trainer.precision_plugin.train_step_context():
                training_step(batch, *((index,) if with_index else ()))
            cost.add(batch)
    cost.seconds += time.perf_counter() - start
    return index + 1


def training_batches(session: Session, num_batches: int | None, *, epoch: int) -> Generator[Any]:
    """Yield batches of the training loader as a training step gets them, on the device.

    The running iteration, its samplers and the global random state do not change. The batches, and random draws until they are
    exhausted, depend only on the run's seed and ``epoch``. Close the generator if you do not exhaust it.

    Args:
        session: the run.
        num_batches: the maximum number on each rank; None uses the whole epoch.
        epoch: the epoch given to samplers, and the key of the random draws.

    Raises:
        ValueError: if ``num_batches`` is None and the loader has no length.
    """
    trainer, module = session.trainer, session.module
    if trainer.fit_loop._combined_loader is None:  # no data has been requested yet
        trainer.fit_loop.setup_data()
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    limit = min(trainer.num_training_batches, math.inf if num_batches is None else num_batches)
    if math.isinf(limit):
        raise ValueError(
            "Got a training loader without a length and no number of batches, so a pass over the data may never end."
            " Give the number of batches."
        )
    stage = trainer.state.stage
    with rng.keyed(session.seed, "passes", epoch):
        again = apart(combined, epoch)
        trainer.training = True  # the module's transfer hooks may read it
        try:
            for batch, _, _ in itertools.islice(again, int(limit)):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
                yield trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        finally:
            trainer.state.stage = stage
            again.reset()


@contextmanager
def unseen(session: Session) -> Iterator[None]:
    """Run in evaluation mode with a training step's precision, without a graph, and restore all state afterwards."""
    precision = session.trainer.precision_plugin.train_step_context()
    evaluation = in_evaluation(session.module.modules())
    with torch.no_grad(), rng.fork(), silent(session.module), precision, evaluation:
        yield


def call_of(session: Session, block: nn.Module, batch: Any, batch_idx: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the module's ``training_step`` calls ``block`` on ``batch``, in one forward pass.

    Use it inside :func:`unseen`. The step's links do not run. Arguments other than tensors are copied before the block can
    change them. The cost is counted.

    Raises:
        ValueError: if the step does not call the block.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((tuple(_apart(value) for value in args), {key: _apart(value) for key, value in kwargs.items()}))

    start = time.perf_counter()
    with_index = takes_index(session.own_step)
    handle = hook_before(block, note, with_kwargs=True)
    try:
        session._evaluation(session.own_step)(batch, *((batch_idx,) if with_index else ()))
    finally:
        handle.remove()
    session.chain.cost.add(batch, since=start)
    if not calls:
        raise ValueError(
            f"training_step did not call a {type(block).__name__} that it should call on each batch. Name another stack"
            " by layers=."
        )
    return calls[0]


def loss_of(session: Session, batch: Any, batch_idx: int, *, whole: bool) -> float | None:
    """Return the loss of the module's ``training_step`` on ``batch``, in one forward pass; None if it returns none.

    Use it inside :func:`unseen`. The step's links do not run. The cost is counted.

    Args:
        session: the run.
        batch: the batch, on the device.
        batch_idx: its index.
        whole: run all blocks, as in the plain module; otherwise those that evaluation runs.
    """
    original, start = session.own_step, time.perf_counter()
    step = original if whole else session._evaluation(original)
    output = step(batch, *((batch_idx,) if takes_index(original) else ()))
    session.chain.cost.add(batch, since=start)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return None if loss is None else float(loss)


@contextmanager
def restoring(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of these tensors when the context ends."""
    kept = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in kept:
                t.copy_(value)


def _apart(value: Any) -> Any:
    return value if isinstance(value, Tensor) else copy.deepcopy(value)
