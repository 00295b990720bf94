"""Find the tensors that a graph holds for its backward pass, by walking it without hooks, so that nothing changes."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch._C._autograd import SavedTensor
from torch.autograd.graph import Node
from torch.optim import Optimizer

from lightning_eff._core._lightning.names import both

_DEPTH = 12  # of nested objects that are searched for tensors, such as hooks' objects in lists in objects
_CLOSED = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.MethodType,
    nn.Module,
    Callback,
    Trainer,
    Optimizer,
    torch.Generator,
    weakref.ref,
)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the memory of ``tensors`` as bytes by address, each storage once. Sharded tensors count their local part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = local.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses without a storage
            address, size = id(local), local.numel() * local.element_size()
        if address:
            found[address] = size
    return found


def held_bytes(roots: Iterable[Tensor], apart: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes on ``device`` that the graphs of ``roots`` hold, each storage once, without those of ``apart``.

    Hooks for saved tensors may replace a tensor with codes, copies, or the inputs for recomputation. The replacement then
    counts, if it is a tensor or a Python object with tensors.
    """
    without = storages(apart)
    held = storages(t for t in held_tensors(roots) if t.device.type == device.type)
    return sum(size for address, size in held.items() if address not in without)


def held_tensors(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield every tensor that the graphs of ``roots`` hold for their backward pass, some of them twice."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Node] = set(waiting)
    looked: dict[int, Any] = {}
    while waiting:
        node = waiting.pop()
        yield from _tensors(node, looked)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _tensors(value: Any, looked: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors in ``value``; ``looked`` holds the visited objects and keeps them alive."""
    closed = both(*_CLOSED)
    waiting = [(value, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, closed):
            continue
        if id(value) in looked or depth > _DEPTH:
            continue
        looked[id(value)] = value
        if isinstance(value, Tensor):
            parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()  # pyright: ignore[reportAttributeAccessIssue]
            if not parts or hasattr(value, "_local_tensor"):
                yield value
            waiting.extend((getattr(value, part), depth + 1) for part in parts if not hasattr(value, "_local_tensor"))
            continue
        waiting.extend((part, depth + 1) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    """Return the objects that ``value`` refers to."""
    if isinstance(value, SavedTensor):
        hook: Any = getattr(value, "unpack_hook", None)
        # torch's checkpoints keep their inputs with the hook
        ours = [hook] if getattr(hook, "__module__", None) == "torch.utils.checkpoint" else []
        return [getattr(value, "data", None), *ours]
    if isinstance(value, Node):
        return _saved(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if getattr(type(value), "outlives_graph", False):
        return []
    names = [name for cls in type(value).__mro__ for name in _slots(cls)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]


def _saved(node: Node) -> list[Any]:
    """Return the objects that a graph node saved, in autograd or as attributes of a custom function's context."""
    found: list[Any] = list(getattr(node, "__dict__", {}).values())
    for name in _raw_names(type(node)):
        try:
            found.append(getattr(node, name))
        except RuntimeError:  # the backward pass has freed it
            continue
    return found


@functools.cache
def _raw_names(cls: type) -> tuple[str, ...]:
    return tuple(name for name in dir(cls) if name.startswith("_raw_saved_"))


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
