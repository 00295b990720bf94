"""Parameters that an optimizer does not hold any more, since no gradient is computed for them."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer, group_without


def forget(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Take ``parameters`` out of the groups of ``optimizer``, which stay as many, for schedulers, though some may be empty.

    An optimizer that keeps state already is left as it is: it may have made plans with what it was given.

    Args:
        optimizer: that has stepped nothing yet.
        parameters: of which it may have some.
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
