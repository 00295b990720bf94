"""Convert a batch, or the output of a step, to plain containers that load with ``weights_only=True``."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Unpackable(TypeError):
    """A checkpoint cannot hold an object of this class."""


def pack(value: Any) -> Any:
    """Return ``value`` as plain containers, on the CPU and without graphs.

    Raises:
        Unpackable: if a part of it is neither a container nor data.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return {"kind": "tensor", "value": value.detach().to("cpu", copy=True), "moved": value.device.type != "cpu"}
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise Unpackable(f"an array of {array.dtype}")
        return {"kind": "array", "value": torch.from_numpy(array.copy()), "scalar": isinstance(value, np.generic)}
    if type(value) in (list, tuple):
        return {"kind": type(value).__name__, "items": [pack(item) for item in value]}
    if type(value) is dict:
        return {"kind": "dict", "keys": [pack(key) for key in value], "items": [pack(item) for item in value.values()]}
    return _pack_object(value)


def _pack_object(value: Any) -> dict[str, Any]:
    cls: Any = type(value)
    owner: Any = value
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        how, inner = "named", tuple(value)
    elif dataclasses.is_dataclass(value):
        how, inner = "dataclass", {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    elif isinstance(value, Mapping):
        how, inner = "mapping", dict(value)
    elif callable(getattr(cls, "from_dict", None)) and callable(getattr(owner, "to_dict", None)):
        how, inner = "from_dict", dict(owner.to_dict())
    else:
        raise Unpackable(cls.__name__)
    return {"kind": how, "class": [cls.__module__, cls.__qualname__], "items": pack(inner)}


def unpack(packed: Any, device: torch.device) -> Any:
    """Restore the value given to :func:`pack`; tensors that were on an accelerator are moved to ``device``.

    Raises:
        Unpackable: if one of its classes is not imported here. No class is imported, and no code of a checkpoint runs.
    """
    if not isinstance(packed, dict):
        return packed
    kind = packed["kind"]
    if kind == "tensor":
        return packed["value"].to(device) if packed["moved"] else packed["value"]
    if kind == "array":
        array = packed["value"].numpy()
        return array[()] if packed["scalar"] else array
    if kind in ("list", "tuple"):
        items = [unpack(item, device) for item in packed["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        pairs = zip(packed["keys"], packed["items"], strict=True)
        return {unpack(key, device): unpack(item, device) for key, item in pairs}
    return _unpack_object(kind, packed["class"], unpack(packed["items"], device))


def _unpack_object(kind: str, path: list[str], inner: Any) -> Any:
    cls: Any = sys.modules.get(path[0])
    for name in path[1].split("."):
        cls = getattr(cls, name, None)
    if not isinstance(cls, type):
        raise Unpackable(".".join(path))
    owner: Any = cls
    if kind == "named" and issubclass(cls, tuple):
        return owner(*inner)
    if kind == "dataclass" and dataclasses.is_dataclass(cls):
        return owner(**inner)
    if kind == "mapping" and issubclass(cls, Mapping):
        return owner(inner)
    if kind == "from_dict" and callable(getattr(cls, "from_dict", None)):
        return owner.from_dict(inner)
    raise Unpackable(".".join(path))
