"""Tensors in the arguments of a block: change them, copy them, look for them."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor

Slot = tuple[str, ...]
"""A tensor's place: its argument, and the keys in tuples, lists and dicts that lead to it."""


def mapped(value: Any, change: Callable[[Slot, Tensor], Tensor], slot: Slot = ()) -> Any:
    """Return arguments with ``change`` applied to each tensor in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(slot, value)
    if type(value) is dict:
        return {key: mapped(item, change, (*slot, str(key))) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, change, (*slot, str(i))) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def copied(value: Any) -> Any:
    """Return arguments with copies of their tensors and of objects that a block may change, such as caches."""

    def copy(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.detach().clone()
        if type(item) is dict:
            return {key: copy(each) for key, each in item.items()}
        if isinstance(item, tuple | list):
            items = [copy(each) for each in item]
            return type(item)(*items) if hasattr(item, "_fields") else type(item)(items)
        try:
            return deepcopy(item)
        except Exception:  # an object that has no copy is passed as it is
            return item

    return copy(value)


def holds_tensors(value: Any) -> bool:
    """Return whether a block's further outputs contain tensors."""
    if isinstance(value, tuple | list):
        return any(holds_tensors(item) for item in value)
    return isinstance(value, Tensor)
