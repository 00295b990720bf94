"""Averages in checkpoints, which are the checkpoint's weights: they are written once."""

from typing import Any

import torch
from torch import Tensor


def share(state: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """Return a callback's state in which tensors that equal one in the checkpoint's ``state_dict`` are that tensor.

    torch writes a storage once, so the checkpoint does not hold these tensors twice. It loads as before.

    Args:
        state: the state. Tensors are in dicts by the name of a parameter or buffer.
        weights: the checkpoint's ``state_dict``.
    """
    if "ranks" not in state:
        return {key: value if key == "raw" else _shared(value, weights, None) for key, value in state.items()}
    sizes = [rank.get("held") or {} for rank in state["ranks"]]
    return {
        "ranks": [
            {key: value if key == "raw" else _shared(value, weights, sizes[:place]) for key, value in rank.items()}
            for place, rank in enumerate(state["ranks"])
        ]
    }


def _shared(value: Any, weights: dict[str, Any], before: list[dict[str, Tensor]] | None) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _same(name, entry, weights.get(name), before) for name, entry in value.items()}


def _same(name: str, own: Any, whole: Any, before: list[dict[str, Tensor]] | None) -> Any:
    """``whole``, or the part of it that a rank holds behind the parts of the ranks ``before`` it, if ``own`` equals that."""
    if not (
        isinstance(own, Tensor) and type(whole) is Tensor and own.dtype == whole.dtype and own.device == whole.device
    ):
        return own
    divided = [dim for dim in range(own.ndim) if own.ndim == whole.ndim and own.shape[dim] != whole.shape[dim]]
    if before is not None and len(divided) == 1:
        (dim,) = divided
        start = sum(held[name].shape[dim] for held in before if name in held)
        if start + own.shape[dim] <= whole.shape[dim]:
            whole = whole.narrow(dim, start, own.shape[dim])
    return whole if torch.equal(own, whole) else own
