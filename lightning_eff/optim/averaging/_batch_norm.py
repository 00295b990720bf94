"""BatchNorm statistics of weights that no training step has run at: recomputed on training data, never averaged."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_eff._core.passes import forward_over_training_data
from lightning_eff._core.session import Session
from lightning_eff._core.steps import silent


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of ``module`` that keep running statistics, by their path."""
    return {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, _BatchNorm) and isinstance(m.running_mean, Tensor)
    }


def modes(module: nn.Module) -> dict[str, bool]:
    """``training`` of every submodule, by its path."""
    return {name: m.training for name, m in module.named_modules()}


@torch.no_grad()
def recompute_statistics(
    session: Session, training: Mapping[str, bool], num_batches: int | None, *, epoch: int
) -> dict[str, Tensor]:
    """Running statistics at the module's present weights, as ``torch.optim.swa_utils.update_bn`` finds them.

    ``mean = (1/n) sum_j mean_j`` and ``var = (1/n) sum_j var_j`` over n training batches, of all ranks together. Layers
    run in their training mode, so frozen layers keep their statistics. Dropout is off, as in evaluation.

    Args:
        session: the run. Its module does not change.
        training: :func:`modes` of the module in training.
        num_batches: n on each rank; None means a whole epoch.
        epoch: number of the epoch, for the draw of batches.

    Returns:
        The buffers of each layer that saw data, by their dotted name.
    """
    module = session.module
    norms = {name: m for name, m in batch_norms(module).items() if training.get(name, m.training)}
    if not norms:
        return {}
    submodules = dict(module.named_modules())
    evaluating = modes(module)
    momenta = {name: m.momentum for name, m in norms.items()}
    with silent(module):
        try:
            for name, m in submodules.items():
                m.training = training.get(name, m.training) and not isinstance(m, _DropoutNd)
            for m in norms.values():
                m.reset_running_stats()
                m.momentum = None  # cumulative
            forward_over_training_data(session, num_batches, epoch=epoch)
            own = {name: {key: b.clone() for key, b in m.named_buffers(recurse=False)} for name, m in norms.items()}
        finally:
            for name, m in norms.items():
                m.momentum = momenta[name]
            for name, m in submodules.items():
                m.training = evaluating[name]
    found: dict[str, Tensor] = {}
    for name, buffers in _over_ranks(session, own).items():
        if buffers["num_batches_tracked"] > 0:  # a layer that no batch reached keeps its statistics
            found |= {f"{name}.{key}" if name else key: value for key, value in buffers.items()}
    return found


def _over_ranks(session: Session, own: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Each layer's statistics over the batches of all ranks, the same on all of them."""
    ranks = session.gather({name: {k: b.cpu() for k, b in buffers.items()} for name, buffers in own.items()})
    if len(ranks) == 1:
        return own
    for name, buffers in own.items():
        counts = [rank[name]["num_batches_tracked"].double() for rank in ranks]
        total = torch.stack(counts).sum().clamp_min(1)
        for key, buffer in buffers.items():
            if buffer.is_floating_point():
                values = torch.stack([rank[name][key].double() * n for rank, n in zip(ranks, counts, strict=True)])
                buffer.copy_(values.sum(dim=0) / total)
        buffers["num_batches_tracked"].copy_(torch.stack(counts).sum())
    return own
