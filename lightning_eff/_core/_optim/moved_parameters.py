"""Parameters taken out of the module's optimizer and given to another, which steps with it as one."""

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
    """Let the optimizer that ``make`` makes step ``parameters``, and ``own`` the others, both as one.

    The new one's rate is at every time the multiple of its own that the module's schedulers make of the rate of the group
    that the first of the parameters was in.

    Args:
        own: the module's, which has all of ``parameters`` and needs gradients alone; one that is of several parts already
            gets another.
        schedulers: around ``own``.
        parameters: one or more.
        make: makes the other optimizer, with one rate for all.
        who: begins messages.

    Raises:
        ValueError: if the rate of that group is zero and a scheduler moves it.
    """
    origin, reference = _home(own, schedulers, parameters[0])
    other = make(parameters)
    full = float(other.param_groups[0]["lr"])
    if not reference and schedulers:
        raise ValueError(
            f"{who}: the module's {type(own).__name__} has a rate of {reference} in group {origin}, to which {full:g} is in no"
            " proportion, and a scheduler moves it; expected a rate above zero there."
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
    """The index of the module's own group that ``parameter`` was in, and the rate that its schedule is a multiple of."""
    at = next(i for i, group in enumerate(own.param_groups) if any(p is parameter for p in group["params"]))
    if not isinstance(own, CombinedOptimizer):
        return at, reference_rates(own, schedulers)[at]
    how = own.following[at]
    return how.origin, how.full / how.ratio if how.full is not None and how.ratio else None
