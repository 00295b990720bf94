"""Move parameters from the module's optimizer to another one, which steps together with it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._optim.combined import CombinedOptimizer, Following, Origins, group_without, take_groups
from lightning_eff._core._optim.scheduled import put_around, reference_rates


def join(
    own: Optimizer,
    schedulers: list[Any],
    parameters: list[Tensor],
    make: Callable[[list[Tensor]], Optimizer],
    *,
    who: str,
) -> CombinedOptimizer:
    """Let the optimizer from ``make`` step ``parameters``, and ``own`` the others, combined into one.

    The new optimizer's learning rate follows the module's schedule: it is scaled like the learning rate of the group that had
    the first of the parameters.

    Args:
        own: the module's optimizer, which has all of ``parameters`` and needs only gradients. A combined one gets another part.
        schedulers: the schedulers of ``own``.
        parameters: at least one.
        make: creates the other optimizer, with one learning rate for all.
        who: the start of messages.

    Raises:
        ValueError: if the learning rate of that group is zero and a scheduler changes it.
    """
    origin, reference = _home(own, schedulers, parameters[0])
    other = make(parameters)
    full = float(other.param_groups[0]["lr"])
    if not reference and schedulers:
        raise ValueError(
            f"{who}: the module's {type(own).__name__} has a learning rate of {reference} in group {origin}, which a scheduler"
            f" changes, so {full:g} cannot follow it in proportion. Set a learning rate above zero there."
        )
    ratio = full / reference if reference else None
    followed = [Following(origin, ratio, full, settings=False) for _ in other.param_groups]
    if isinstance(own, CombinedOptimizer):
        combined = own
        combined.add_part(other, followed)
    else:
        references, origins = reference_rates(own, schedulers), Origins(own)
        divided = [(i, group_without(group, parameters)) for i, group in enumerate(own.param_groups)]
        stay = [(i, group) for i, group in divided if group["params"]]
        take_groups(own, [group for _, group in stay])
        kept = [Following(i, None if references[i] is None else 1.0, references[i], settings=True) for i, _ in stay]
        combined = CombinedOptimizer([other, own] if stay else [other], origins, [*followed, *kept])
        put_around(combined, own, schedulers)
    if schedulers:
        for group in other.param_groups:
            group["initial_lr"] = full
        combined.follow()
    return combined


def _home(own: Optimizer, schedulers: list[Any], parameter: Tensor) -> tuple[int, float | None]:
    """Return the index of the module's group that had ``parameter``, and the learning rate that its schedule scales."""
    at = next(i for i, group in enumerate(own.param_groups) if any(p is parameter for p in group["params"]))
    if not isinstance(own, CombinedOptimizer):
        return at, reference_rates(own, schedulers)[at]
    how = own.following[at]
    return how.origin, how.full / how.ratio if how.full is not None and how.ratio else None
