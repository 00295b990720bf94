"""Modules whose weight is a learnt multiple of the stored one, so that a residual branch that ends in them is scaled."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

#: The name of the parameter, beside the tensors that it scales.
SCALE = "branch_scale"


class Scaled(nn.Module):
    """Mixed into a module's class: tensors that are multiplied by a parameter whenever the module computes with them.

    ``F(x) = W x + b`` becomes ``s F(x) = (s W) x + s b`` while the module's own ``forward`` runs. Outside of it, the
    tensors are the stored ones, under their own names. Dropout behind the layer commutes with the scale. torch's own
    attention and encoder layers read the tensors instead of calling the module; for those, the tensors are always
    scaled.

    Attributes:
        scaled: the scaled tensors: by name, the parameter that scales it, and the dimension of the tensor that holds
            the channels. The parameter, ``branch_scale``, has shape (1,), or (C,) with one number per channel.
        begins_at: the first value of s.
        read_by_others: whether the module is part of one that reads its tensors.
    """

    scaled: dict[str, tuple[str, int]]
    begins_at: float
    read_by_others: bool
    _homes: "dict[str, tuple[Scaled, str]]"  # where the scale is another module's, since a branch may end in several
    _reading: bool

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reading = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._reading = self.read_by_others

    def scale_for(self, name: str, tensor: Tensor) -> Tensor:
        """Return s, in a shape that multiplies ``tensor``."""
        key, dim = self.scaled[name]
        home, key = self._homes.get(key, (self, key))
        scale = cast(Tensor, stored_in(home, key))
        shape = [1] * tensor.ndim
        shape[dim] = -1
        return scale.view(shape)

    @property
    def undecayed(self) -> list[str]:
        """The names of this module's own scales, which have no weight decay."""
        return [key for key in dict.fromkeys(key for key, _ in self.scaled.values()) if key not in self._homes]

    def reset_parameters(self) -> None:
        """Reset the stored tensors as the class does, and s to its first value."""
        self._reading = False
        try:
            reset = getattr(super(), "reset_parameters", None)
            if reset is not None:
                reset()
        finally:
            self._reading = self.read_by_others
        with torch.no_grad():
            for key in self.undecayed:
                cast(Tensor, self._parameters[key]).fill_(self.begins_at)

    def fold(self) -> Mapping[str, Tensor]:
        """Return the stored tensors times s."""
        found = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
        for key in self.undecayed:
            del found[key]
        return {
            name: (t * self.scale_for(name, t)).to(t.dtype) if name in self.scaled else t for name, t in found.items()
        }

    @override
    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"scaled={sorted(self.scaled)}")))

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return blank, (type(self).__bases__[1], tuple(self.scaled)), self.__dict__


def stored_in(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter as its module's code reads it: under tensor parallelism, the whole tensor or the local part."""
    stored = module._parameters[name]
    return cast(Tensor, module.__getattr__(name)) if isinstance(stored, DTensor) else stored


def reader(name: str) -> property:
    """Return a property that gives the stored tensor, times s while the module computes."""

    def get(self: Scaled) -> Tensor | None:
        stored = stored_in(self, name)
        if stored is None or not self._reading or (self.read_by_others and isinstance(stored, DTensor)):
            return stored  # divided tensors become whole before they are used, and a strategy looks for its own
        return stored * self.scale_for(name, stored)

    return property(get)


@functools.cache
def _scaled_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[Scaled]:
    members = {"__module__": __name__, **{name: reader(name) for name in names}}
    return cast("type[Scaled]", type(f"Scaled{cls.__name__}", (Scaled, cls), members))


def blank(cls: type[nn.Module], names: tuple[str, ...]) -> Scaled:
    """Return an instance without any state."""
    made = _scaled_class(cls, names)
    return made.__new__(made)


def scaled(
    plain: nn.Module,
    tensors: dict[str, tuple[int, int]],
    *,
    begins_at: float,
    sizes: Sequence[int],
    homes: dict[int, tuple[Scaled, str]],
    read_by_others: bool,
    made: Scaled | None = None,
) -> Scaled:
    """Return a module with ``plain``'s class, parameters and settings, some of whose tensors are scaled.

    Args:
        plain: the module.
        tensors: by name of its own parameters, the branch that each one ends, and its dimension that holds channels.
        begins_at: the first value of s.
        sizes: for each branch, how many numbers its scale has.
        homes: for each branch that already has its scale, the module that stores it and its name; new scales are added.
        read_by_others: whether ``plain`` is part of a module that reads its tensors.
        made: an instance of a subclass without any state, to be filled.
    """
    made = blank(type(plain), tuple(tensors)) if made is None else made
    made.__dict__.update({k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in plain.__dict__.items()})
    made.__dict__.update(scaled={}, begins_at=begins_at, _homes={})
    made.__dict__.update(read_by_others=read_by_others, _reading=read_by_others)
    keys: dict[int, str] = {}
    for name, (branch, dim) in tensors.items():
        if branch not in keys:
            keys[branch] = key = f"{SCALE}_{len(keys) + 1}" if keys else SCALE
            if branch in homes:
                made._homes[key] = homes[branch]
            else:
                made.register_parameter(key, nn.Parameter(torch.full((sizes[branch],), begins_at)))
                homes[branch] = made, key
        made.scaled[name] = keys[branch], dim
    return made
