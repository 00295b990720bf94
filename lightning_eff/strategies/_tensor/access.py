"""Lets a module's code read DTensor parameters as plain tensors.

A parameter of a tensor-parallel module is a DTensor, so that optimizers, clipping, FSDP2 and checkpoints see one kind of
tensor. The ``Read`` for a name decides the result of ``module.weight``:

- ``whole``: the full tensor, gathered at each read, which is right for every use.
- ``local``: this rank's part, for the module's forward.
- ``zero``: zeros instead of a bias that is added after the sum over ranks.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from lightning_eff._core._needs.gathered import gathered, piece
from lightning_eff.strategies._tensor.sections import Exchange

_TABLE = "_tensor_parallel_reads"


@dataclass(frozen=True)
class Read:
    """The form in which code reads a parameter.

    Attributes:
        kind: "whole", "local" or "zero".
        partial: whether gradients are partial sums on each rank. Otherwise they are equal on all ranks.
        exchange: rows that ranks exchange after a local read, for weights with several sections.
        columns: whether the exchange is along the last dimension, as in ``Conv1D``.
    """

    kind: str
    partial: bool = False
    exchange: Exchange | None = None
    columns: bool = False


def read(param: DTensor, how: Read) -> Tensor:
    """Return ``param`` as a differentiable plain tensor.

    Args:
        param: a DTensor on the tensor-parallel mesh.
        how: the form.
    """
    if how.kind == "whole":
        grads: list[Placement] = [Partial() if how.partial else Replicate()]
        return gathered(param.redistribute(placements=[Replicate()]).to_local(grad_placements=grads), param)
    local = param.to_local()
    if how.kind == "zero":
        return torch.zeros_like(local)
    if how.exchange is None:
        return piece(local)
    if how.columns and local.ndim > 1:
        return piece(how.exchange(local.movedim(-1, 0)).movedim(0, -1))
    return piece(how.exchange(local))


class _Reads:
    """Mixed into the class of a module whose parameters are read as plain tensors."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        # under FSDP2 a parameter is on the tensor-parallel mesh only while its module runs, and otherwise on a larger one
        if isinstance(value, DTensor) and value.device_mesh.ndim == 1:
            how = self.__dict__[_TABLE].get(name)
            if how is not None:
                return read(value, how)
        return value


@functools.cache
def _reading_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_Reads, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class without the mixin of this file."""
    return type(module).__mro__[2] if isinstance(module, _Reads) else type(module)


def set_read(module: nn.Module, name: str, how: Read) -> None:
    """Set the form in which code reads the parameter ``name`` of ``module``."""
    if not isinstance(module, _Reads):
        object.__setattr__(module, "__class__", _reading_class(type(module)))
        module.__dict__[_TABLE] = {}
    module.__dict__[_TABLE][name] = how


def clear_read(module: nn.Module, name: str) -> None:
    """Let code read the DTensor itself, as torch's styles need it."""
    module.__dict__.get(_TABLE, {}).pop(name, None)
