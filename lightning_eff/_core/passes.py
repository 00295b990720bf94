"""Forward passes of the user's ``training_step`` over training data, beside the running epoch and without a trace in it."""

import itertools
import math
import time
from contextlib import suppress

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_eff._core import rng
from lightning_eff._core.batches import num_samples
from lightning_eff._core.loaders import apart
from lightning_eff._core.session import Session


def forward_over_training_data(session: Session, num_batches: int | None, *, epoch: int) -> int:
    """Run the module's own ``training_step``, forward only, on batches of the training loader.

    The running iteration, its samplers and the global random state stay as they are; which batches are used, and what
    they draw, depends on the run's seed and ``epoch`` alone. Links of techniques take no part, and blocks are shown as in
    evaluation. The cost is counted. Logs, buffers and metrics are the caller's to protect, by :func:`steps.silent`.

    Args:
        session: the run, with its training data set up.
        num_batches: how many batches on each rank; None takes the whole epoch.
        epoch: the epoch that samplers are told, and the key of what is drawn.

    Returns:
        The number of batches used.

    Raises:
        ValueError: if ``num_batches`` is None and the loader has no length.
    """
    trainer, module, cost = session.trainer, session.module, session.chain.cost
    limit = min(trainer.num_training_batches, math.inf if num_batches is None else num_batches)
    if math.isinf(limit):
        raise ValueError(
            "Got a training loader without a length, and no number of batches to go over; expected one of the two, since"
            " the data may never end. Give the number of batches."
        )
    combined = trainer.fit_loop._combined_loader
    assert combined is not None, "the training data is set up before it is gone over"
    takes_index = is_param_in_hook_signature(session.chain.original, "batch_idx", min_args=2)
    training_step = session._evaluation(session.chain.original)
    start, stage, index = time.perf_counter(), trainer.state.stage, -1
    with rng.keyed(session.seed, "passes", epoch), torch.inference_mode(False), torch.no_grad():
        again = apart(combined, epoch)
        trainer.training = True  # what the module's transfer hooks may ask
        try:
            for index, (batch, _, _) in enumerate(itertools.islice(again, int(limit))):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                with trainer.precision_plugin.train_step_context():
                    training_step(batch, *((index,) if takes_index else ()))
                with suppress(ValueError):  # batches of no tensors have no samples to count
                    cost.forward_samples += num_samples(batch)
        finally:
            trainer.state.stage = stage
            again.reset()
    cost.forward_passes += index + 1
    cost.seconds += time.perf_counter() - start
    return index + 1
