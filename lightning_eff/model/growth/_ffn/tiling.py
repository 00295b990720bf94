"""Repeats the hidden units of a feed-forward network so that its function is kept (Gu et al. 2020; Chen et al. 2016)."""

from typing import Any

import torch
from torch import Generator, Tensor

from lightning_eff._core._branches.ffns import Part

# the power of the gradient to which a tensor of an optimizer's state is proportional; others are repeated unchanged
_POWERS = {"exp_avg": 1, "momentum_buffer": 1, "exp_inf": 1, "acc_delta": 0, "ax": 0} | dict.fromkeys(
    ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), 2
)


def taken(t: Tensor, part: Part, units: int) -> Tensor:
    """Return the first ``units`` hidden units of ``t`` along ``part.dim``; a view where that is possible."""
    if part.groups == 1:
        return t.narrow(part.dim, 0, units)
    dim, groups = part.dim, part.groups
    return t.unflatten(dim, (groups, -1)).narrow(dim + 1, 0, units).flatten(dim, dim + 1)


def put(t: Tensor, part: Part, value: Tensor) -> None:
    """Write ``value``, as returned by :func:`taken`, into the first hidden units of ``t``."""
    dim, groups = part.dim, part.groups
    units = value.shape[dim] // groups
    t.unflatten(dim, (groups, -1)).narrow(dim + 1, 0, units).copy_(value.unflatten(dim, (groups, units)))


def clear(t: Tensor, part: Part, units: int) -> None:
    """Zero all but the first ``units`` hidden units of ``t``."""
    t = t.unflatten(part.dim, (part.groups, -1))
    t.narrow(part.dim + 1, units, t.shape[part.dim + 1] - units).zero_()


def repeated(t: Tensor, part: Part, times: int) -> Tensor:
    """Repeat the hidden units of ``t`` ``times`` times: all of them, then all of them again."""
    dim, groups = part.dim, part.groups
    t = t.unflatten(dim, (groups, -1))
    repeats = [1] * t.ndim
    repeats[dim + 1] = times
    return t.repeat(repeats).flatten(dim, dim + 1)


def tiled(weight: Tensor, part: Part, times: int) -> Tensor:
    """Return ``W_1 := [W_1; ..; W_1]`` or ``W_2 := [W_2, .., W_2] / k``, which keep ``W_2 f(W_1 x)``."""
    return repeated(weight, part, times) / (times if part.last else 1)


def apart(weight: Tensor, part: Part, times: int, noise: float, generator: Generator) -> Tensor:
    """Add noise to ``weight``, as made by :func:`tiled`, that makes copies of a hidden unit differ and sums to 0 over
    them.

    Its size is ``noise`` times the root mean square of the weights. The function is unchanged in first order.
    """
    dim, groups = part.dim, part.groups
    whole = weight.unflatten(dim, (groups, times, -1))
    drawn = torch.randn(whole.shape, generator=generator, dtype=torch.float32).to(weight.device)
    drawn = drawn - drawn.mean(dim=dim + 1, keepdim=True)
    size = noise * weight.detach().double().square().mean().sqrt()
    return weight + (size * drawn.double()).to(weight.dtype).flatten(dim, dim + 2)


def padded(state: dict[str, Any], part: Part, units: int, hidden: int) -> dict[str, Any]:
    """Return the optimizer state of the first ``units`` of ``hidden`` units as the state of all, with zeros for absent
    ones.
    """

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
    """Undo :func:`padded`."""
    return {
        key: taken(value, part, units).clone(memory_format=torch.contiguous_format)
        if _has(value, part, hidden)
        else value
        for key, value in state.items()
    }


def _has(value: Any, part: Part, units: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > part.dim and value.shape[part.dim] == part.groups * units


def tiled_state(state: dict[str, Any], part: Part, units: int, times: int) -> dict[str, Any] | None:
    """Return the optimizer state of a parameter whose hidden units are repeated, as if they had been repeated all along.

    The gradient of a repeated unit's ``W_1`` is ``1 / k`` of the unit's gradient; that of ``W_2`` is the same. The
    result is None for state of unknown form, such as low-bit and factored moments.
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
