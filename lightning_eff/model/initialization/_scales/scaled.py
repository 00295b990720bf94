"""Modules whose weight is a learnt multiple of what they store, so that a residual branch which ends in them is scaled."""

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
    """What a class of modules is made to have: tensors that are multiplied by a parameter wherever they are read.

    ``F(x) = W x + b`` becomes ``s F(x) = (s W) x + s b``, while the module's own ``forward`` runs; to others the tensors are
    what is stored, under their own names. Dropout behind the map and the scale may change places. In torch's own attention
    and encoder layers, which read the tensors instead of calling the module, others get the scaled ones too.

    Attributes:
        scaled: the tensors that are scaled: by name, the parameter that does it, and the dimension of the tensor that is the
            stream's channels. The parameter, ``branch_scale``, has shape (1,), or (C,) for a number for each channel.
        begins_at: the first value of s.
        read_by_others: the module is a part of one that reads its tensors.
    """

    scaled: dict[str, tuple[str, int]]
    begins_at: float
    read_by_others: bool
    _homes: "dict[str, tuple[Scaled, str]]"  # of scales that another module has, since a branch ends in several
    _reading: bool

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reading = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._reading = self.read_by_others

    def scale_for(self, name: str, tensor: Tensor) -> Tensor:
        """s, in a shape that multiplies ``tensor``."""
        key, dim = self.scaled[name]
        home, key = self._homes.get(key, (self, key))
        scale = cast(Tensor, stored_in(home, key))
        shape = [1] * tensor.ndim
        shape[dim] = -1
        return scale.view(shape)

    @property
    def undecayed(self) -> list[str]:
        """The names of the scales that this module has, which weight decay passes over."""
        return [key for key in dict.fromkeys(key for key, _ in self.scaled.values()) if key not in self._homes]

    def reset_parameters(self) -> None:
        """The class's own, on what is stored, and s at its first value."""
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
        """What is stored, times s."""
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
    """A parameter as code of its module reads it: under tensor parallelism a whole one, or the part to compute with."""
    stored = module._parameters[name]
    return cast(Tensor, module.__getattr__(name)) if isinstance(stored, DTensor) else stored


def reader(name: str) -> property:
    """The stored tensor of that name, times s where it is read to be computed with."""

    def get(self: Scaled) -> Tensor | None:
        stored = stored_in(self, name)
        if stored is None or not self._reading or (self.read_by_others and isinstance(stored, DTensor)):
            return stored  # divided tensors are whole when they are computed with, and a strategy looks for its own
        return stored * self.scale_for(name, stored)

    return property(get)


@functools.cache
def _scaled_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[Scaled]:
    members = {"__module__": __name__, **{name: reader(name) for name in names}}
    return cast("type[Scaled]", type(f"Scaled{cls.__name__}", (Scaled, cls), members))


def blank(cls: type[nn.Module], names: tuple[str, ...]) -> Scaled:
    """An instance without any state."""
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
    """A module with ``plain``'s own class, parameters and settings, of which some tensors are scaled.

    Args:
        plain: the module.
        tensors: which of its own parameters: by name, the branch that each ends, and the dimension of it that is channels.
        begins_at: the first value.
        sizes: for each branch, how many numbers its scale has.
        homes: for each branch that has its scale already, the module that has it and its name there; what is made is added.
        read_by_others: whether ``plain`` is a part of a module that reads its tensors.
        made: of a subclass and without any state, what is to become it.
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
