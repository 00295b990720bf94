"""Tensors that can be computed from the saved tensors of a norm or an activation, and need no separate codes.

The input of a linear layer behind ``y = (x - mean) rstd weight + bias`` is computed from the decoded ``x`` and the norm's exact
mean and rstd. The weight's gradient stays unbiased, since ``y`` is a line in ``x``. Behind GELU or SiLU, it is the function of
the decoded ``x``, which is curved, so the mean over roundings is off by ``g''(x) Var / 2``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_eff.memory._compression.identity import Identity, Storages, identity, storage_id

_CURVED: dict[str, Callable[..., Tensor]] = {"gelu": F.gelu, "silu": F.silu}
NORMS = frozenset(("layer_norm",))
OPERATIONS = NORMS | _CURVED.keys()

Function = Callable[[Tensor], Tensor]


class _Place(NamedTuple):
    """The memory of a contiguous tensor: equal for two with the same elements in the same order."""

    storage: int
    offset: int
    numel: int
    dtype: torch.dtype
    version: int

    @classmethod
    def of(cls, x: Tensor) -> "_Place":
        return cls(storage_id(x), int(x.storage_offset()), x.numel(), x.dtype, x._version)


class Derivations:
    """Record which tensors of a forward pass follow from which others.

    Args:
        smallest: the smallest number of elements of a recorded tensor.

    Attributes:
        curved: whether GELU and SiLU are recorded too.
    """

    def __init__(self, smallest: int) -> None:
        self._smallest = smallest
        self.curved = False
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._known: dict[_Place, tuple[Identity, Function]] = {}
        self._storages = Storages()

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any, statistics: list[Tensor]) -> None:
        """Record that an operation of ``OPERATIONS`` returned ``y``.

        Args:
            name: the name of the operation.
            args: its arguments.
            kwargs: its keyword arguments.
            y: its result.
            statistics: the mean and reciprocal standard deviation that a norm saved, (..., 1) each.
        """
        x = args[0] if args else None
        if type(x) is not Tensor or type(y) is not Tensor or not y.requires_grad or y.numel() < self._smallest:
            return
        if is_functorch_wrapped_tensor(y) or not y.is_contiguous() or y.dtype != x.dtype or kwargs.get("inplace"):
            return
        function = _norm(args, kwargs, statistics) if name in NORMS else self._curve(name, args, kwargs)
        if function is not None:
            self._storages.keep(x)
            self._storages.keep(y)
            self._known[_Place.of(y)] = identity(x), function

    def _curve(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Function | None:
        if not self.curved or len(args) != 1:
            return None
        return lambda x: _CURVED[name](x, **kwargs)

    def of(self, y: Tensor) -> tuple[Identity, Function] | None:
        """Return the source of ``y`` and the function that computes it, in the shape of ``y``."""
        found = self._known.get(_Place.of(y)) if y.is_contiguous() else None
        if found is None:
            return None
        source, function = found
        shape = y.shape
        return source, lambda x: function(x).reshape(shape)


def _norm(args: tuple[Any, ...], kwargs: dict[str, Any], statistics: list[Tensor]) -> Function | None:
    given = {**dict(zip(("input", "normalized_shape", "weight", "bias"), args, strict=False)), **kwargs}
    weight, bias = given.get("weight"), given.get("bias")
    if len(statistics) != 2 or len(given["normalized_shape"]) != 1:
        return None
    mean, rstd = (t.detach() for t in statistics)

    def normalize(x: Tensor) -> Tensor:
        y = (x.to(mean.dtype) - mean) * rstd
        if weight is not None:
            y = y * weight.detach()
        return (y if bias is None else y + bias.detach()).to(x.dtype)

    return normalize
