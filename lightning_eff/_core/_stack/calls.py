"""Find the hidden state in a block's arguments and output, and copy a block's tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@torch.no_grad()
def copy_block(source: nn.Module, target: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Copy all parameters and buffers of ``source`` to those of the same names in ``target``, in place.

    Both have the same signature, or ``target`` has additional tensors, which do not change.

    Returns:
        The pairs of copied parameters, without parameters that both blocks share.
    """
    buffers, parameters = dict(target.named_buffers()), dict(target.named_parameters())
    for name, old in source.named_buffers():
        if old is not buffers[name]:
            buffers[name].copy_(old)
    pairs = [(old, parameters[name]) for name, old in source.named_parameters() if old is not parameters[name]]
    for old, new in pairs:
        new.copy_(old)
    return pairs


def takes_none(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call surely has no hidden state: it has integer tensors, and no object that may hold others."""
    values = tree_leaves((args, dict(kwargs)))
    found = [value for value in values if isinstance(value, Tensor)]
    plain = all(value is None or isinstance(value, Tensor | int | float | str) for value in values)
    return bool(found) and plain and not any(t.is_floating_point() or t.is_complex() for t in found)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden state in a block's call: its first floating-point tensor."""
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(
        f"A block was called with {[type(a).__name__ for a in args]} and {sorted(kwargs)}; expected a floating-point"
        " tensor, the hidden state, among them. Name another stack by layers=."
    )


def split_output(output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """Return a block's output as (hidden state, the rest of the tuple or None)."""
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0], tuple(output[1:])
    raise TypeError(
        f"A block returned {type(output).__name__}; expected a tensor, or a tuple that begins with one. Name another"
        " stack by layers=."
    )
