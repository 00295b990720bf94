"""Remove parameters without gradients from an optimizer."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer, group_without


def remove_parameters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Remove ``parameters`` from the groups of ``optimizer``, keeping empty groups for schedulers.

    An optimizer with state is not changed, because it may have prepared state for its parameters.

    Args:
        optimizer: an optimizer that has not stepped.
        parameters: parameters of which it may have some.
    """
    gone = list(parameters)
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    for part in parts:
        if part.state:
            continue
        for group in part.param_groups:
            group.update(group_without(group, gone))
    if isinstance(optimizer, CombinedOptimizer):
        optimizer._owners.clear()
