"""A record of the user's module, with names, order, shapes and ties of its tensors, to restore it after a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff.strategies._hybrid.structure import put_in_order


@dataclass(frozen=True)
class Place:
    """A place where a tensor is registered: ``module._parameters[key]`` or ``module._buffers[key]``."""

    module: nn.Module
    key: str

    def put(self, tensor: Tensor) -> None:
        """Register ``tensor`` here, as a parameter or a buffer like in the plain module."""
        namespace = self.module._parameters if isinstance(tensor, nn.Parameter) else self.module._buffers
        namespace[self.key] = tensor  # pyright: ignore[reportArgumentType]


@dataclass
class Slot:
    """One tensor of the plain module, which can be registered in several places (tied weights).

    Attributes:
        name: its first dotted name.
        tensor: the object; after :meth:`Plain.release` a parameter without memory.
        shape: shape of the whole tensor.
        persistent: whether ``state_dict`` has it.
    """

    name: str
    tensor: Tensor
    places: list[Place]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def meta(self) -> bool:
        return self.tensor.is_meta

    def put(self, tensor: Tensor) -> None:
        """Register ``tensor`` in all places of this one."""
        for place in self.places:
            place.put(tensor)

    def placeholder(self, device: torch.device | str) -> Tensor:
        """Return a tensor of this shape without memory: read-only zeros, or a tensor on the meta device."""
        if torch.device(device).type == "meta":
            empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            empty = torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)
        return nn.Parameter(empty, self.requires_grad) if self.is_parameter else empty


class Plain:
    """A record of the plain module, taken before anything is divided.

    Attributes:
        slots: parameters and buffers by first name in the module's order, each object once.
        keys: every key of ``state_dict()`` with the name of its slot, or None if it is not a parameter or buffer.
        parameters: names of parameters in the order of ``module.parameters()``.

    Raises:
        ValueError: if a parameter is divided already.
    """

    def __init__(self, module: nn.Module, *, who: str) -> None:
        self.module = module
        self._orders: list[tuple[nn.Module, str, list[str]]] = []
        self.slots: dict[str, Slot] = {}
        by_id: dict[int, Slot] = {}
        named: dict[str, str] = {}
        for path, owner in module.named_modules(remove_duplicate=False):
            self._orders += [(owner, kind, list(getattr(owner, kind))) for kind in ("_parameters", "_buffers")]
            tensors = [*owner._parameters.items(), *owner._buffers.items()]
            for key, tensor in tensors:
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                if isinstance(tensor, DTensor):
                    raise ValueError(
                        f"{who}: the parameter {name!r} is a DTensor already, but {who} divides the module itself. Remove the"
                        " parallelization from configure_model, or use ModelParallelStrategy."
                    )
                slot = by_id.get(id(tensor))
                if slot is None:
                    slot = by_id[id(tensor)] = self.slots[name] = Slot(
                        name,
                        tensor,
                        [],
                        tensor.shape,
                        tensor.stride(),
                        tensor.dtype,
                        tensor.requires_grad,
                        isinstance(tensor, nn.Parameter) or key not in owner._non_persistent_buffers_set,
                    )
                place = Place(owner, key)
                if not any(p.module is owner and p.key == key for p in slot.places):
                    slot.places.append(place)
                named[name] = slot.name
        self.parameters: list[str] = [by_id[id(p)].name for p in module.parameters()]
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        self.keys: dict[str, str | None] = {}
        for key, value in state.items():
            slot = by_id.get(id(value))
            self.keys[key] = slot.name if slot is not None else named.get(key)

    def current(self) -> dict[str, Tensor]:
        """Return the tensors registered in the slots now, by name: pieces or whole tensors, without those removed."""
        found: dict[str, Tensor] = {}
        for name, slot in self.slots.items():
            for place in slot.places:
                namespace = place.module._parameters if slot.is_parameter else place.module._buffers
                tensor = namespace.get(place.key)
                if tensor is not None:
                    found[name] = tensor
                    break
        return found

    def held(self) -> set[str]:
        """Return the names of the tensors that this rank holds now."""
        reachable = {id(m) for m in self.module.modules()}
        return {name for name in self.current() if any(id(p.module) in reachable for p in self.slots[name].places)}

    @contextmanager
    def shown(self, device: torch.device) -> Iterator[None]:
        """Register placeholders for removed parameters, and use the plain order, until the context ends."""
        there = {id(p.module): {} for slot in self.slots.values() for p in slot.places}
        current = self.current()
        for name, slot in self.slots.items():
            if slot.is_parameter:
                tensor = current[name] if name in current else slot.placeholder(device)
                for place in slot.places:
                    there[id(place.module)][place.key] = tensor
        before: list[tuple[nn.Module, Any]] = []
        for owner, kind, keys in self._orders:
            if kind == "_parameters" and keys:
                before.append((owner, owner._parameters))
                owner.__dict__[kind] = {key: there[id(owner)].get(key) if id(owner) in there else None for key in keys}
        try:
            yield
        finally:
            for owner, parameters in before:
                owner.__dict__["_parameters"] = parameters

    def release(self) -> None:
        """Free the memory of plain parameters that are not used any more."""
        in_use = {id(tensor) for tensor in self.current().values()}
        for slot in self.slots.values():
            if slot.is_parameter and id(slot.tensor) not in in_use and not slot.meta:
                slot.tensor.grad = None
                slot.tensor.data = torch.empty(0, dtype=slot.dtype, device=slot.tensor.device)

    @torch.no_grad()
    def restore(self, whole: dict[str, Tensor] | None) -> None:
        """Register the plain module's tensors again, with the values ``whole``.

        Args:
            whole: values by name. A parameter without a value that is not whole here returns on the meta device, with its
                name and shape but no values.
        """
        current = self.current()
        for name, slot in self.slots.items():
            value = None if whole is None else whole.get(name)
            now = current.get(name)
            if now is slot.tensor and slot.tensor.shape == slot.shape:
                if not slot.is_parameter and value is not None:  # from the stage that saves it
                    slot.tensor.copy_(value)
                slot.put(slot.tensor)
                continue
            if not slot.is_parameter:
                slot.put(value if value is not None else now if now is not None else slot.placeholder("meta"))
            elif value is None:
                slot.put(slot.placeholder("meta"))
            elif slot.meta:
                slot.put(nn.Parameter(value, slot.requires_grad))
            else:
                slot.tensor.data = value
                slot.tensor.requires_grad_(slot.requires_grad)
                slot.tensor.grad = None
                slot.put(slot.tensor)
        for owner, kind, keys in self._orders:
            namespace = getattr(owner, kind)
            if list(namespace) != keys:
                put_in_order(namespace, keys)
