"""Hidden units of a feed-forward network repeated, so that its function stays (Gu et al. 2020; Chen et al. 2016)."""

from typing import Any

import torch
from torch import Generator, Tensor

from lightning_eff._core._branches.ffns import Part

# by what power of the gradient a tensor of an optimizer's state goes; others are repeated as they are
_POWERS = {"exp_avg": 1, "momentum_buffer": 1, "exp_inf": 1, "acc_delta": 0, "ax": 0} | dict.fromkeys(
    ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), 2
)


def taken(t: Tensor, part: Part, units: int) -> Tensor:
    """The first ``units`` hidden units of ``t``, which has them along ``part.dim``; a view where that is possible."""
    if part.groups == 1:
        return t.narrow(part.dim, 0, units)
    dim, groups = part.dim, part.groups
    return t.unflatten(dim, (groups, -1)).narrow(dim + 1, 0, units).flatten(dim, dim + 1)


def put(t: Tensor, part: Part, value: Tensor) -> None:
    """Write ``value``, as :func:`taken` gives it, into the first hidden units of ``t``."""
    dim, groups = part.dim, part.groups
    units = value.shape[dim] // groups
    t.unflatten(dim, (groups, -1)).narrow(dim + 1, 0, units).copy_(value.unflatten(dim, (groups, units)))


def clear(t: Tensor, part: Part, units: int) -> None:
    """Zero all but the first ``units`` hidden units of ``t``."""
    t = t.unflatten(part.dim, (part.groups, -1))
    t.narrow(part.dim + 1, units, t.shape[part.dim + 1] - units).zero_()


def repeated(t: Tensor, part: Part, times: int) -> Tensor:
    """The hidden units of ``t`` ``times`` over: all of them, then all of them again."""
    dim, groups = part.dim, part.groups
    t = t.unflatten(dim, (groups, -1))
    repeats = [1] * t.ndim
    repeats[dim + 1] = times
    return t.repeat(repeats).flatten(dim, dim + 1)


def tiled(weight: Tensor, part: Part, times: int) -> Tensor:
    """``W_1 := [W_1; ..; W_1]``, and ``W_2 := [W_2, .., W_2] / k``: then ``W_2 f(W_1 x)`` is what it was."""
    return repeated(weight, part, times) / (times if part.last else 1)


def apart(weight: Tensor, part: Part, times: int, noise: float, generator: Generator) -> Tensor:
    """``weight``, which :func:`tiled` made, with noise that tells the copies of a hidden unit apart and sums to 0 over them.

    Its size is ``noise`` times the weights' root mean square. In first order the function stays.
    """
    dim, groups = part.dim, part.groups
    whole = weight.unflatten(dim, (groups, times, -1))
    drawn = torch.randn(whole.shape, generator=generator, dtype=torch.float32).to(weight.device)
    drawn = drawn - drawn.mean(dim=dim + 1, keepdim=True)
    size = noise * weight.detach().double().square().mean().sqrt()
    return weight + (size * drawn.double()).to(weight.dtype).flatten(dim, dim + 2)


def padded(state: dict[str, Any], part: Part, units: int, hidden: int) -> dict[str, Any]:
    """An optimizer's state of the first ``units`` of ``hidden`` units, as that of all, zero where they are not there yet."""

    def whole(value: Any) -> Any:
        if not _has(value, part, units):
            return value
        shape = [*value.shape]
        shape[part.dim] = part.groups * hidden
        full = value.new_zeros(shape)
        put(full, part, value)
        return full

    return {key: whole(value) for key, value in state.items()}


def trimmed(state: dict[str, Any], part: Part, units: int, hidden: int) -> dict[str, Any]:
    """What :func:`padded` was given."""
    return {
        key: taken(value, part, units).clone(memory_format=torch.contiguous_format)
        if _has(value, part, hidden)
        else value
        for key, value in state.items()
    }


def _has(value: Any, part: Part, units: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > part.dim and value.shape[part.dim] == part.groups * units


def tiled_state(state: dict[str, Any], part: Part, units: int, times: int) -> dict[str, Any] | None:
    """An optimizer's state of a parameter whose hidden units are repeated: what it were, had they been so all along.

    The gradient of a repeated unit's ``W_1`` is ``1 / k`` of the unit's, that of ``W_2`` is the same. None where the state
    has a form that is not known, as that of low-bit and of factored moments.
    """
    made: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            made[key] = value
        elif _has(value, part, units):
            power = 0 if part.last else _POWERS.get(key, 0)
            made[key] = repeated(value, part, times) / times**power
        else:
            return None
    return made
