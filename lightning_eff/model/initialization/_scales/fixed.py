"""Layers with Fixup's scalars on input and output, which are folded into the bias where that is equivalent."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_eff._core._architecture.folding import CannotFold
from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff.model.initialization._scales.scaled import Scaled, reader, scaled, stored_in

BEFORE, BEHIND = "bias_before", "bias_behind"
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def takes_biases(plain: nn.Module) -> bool:
    """Return whether ``plain`` is a linear layer or convolution that stores its weight and bias itself."""
    held = plain._parameters.get("weight") is not None and "bias" in plain._parameters
    return held and (isinstance(plain, (nn.Linear, *CONVOLUTIONS)) or is_conv1d(plain))


def response(weight: Tensor, plain: nn.Module) -> Tensor:
    """Return ``W 1``, the output for an input of ones without the bias; shape (N,)."""
    return weight.sum(0) if is_conv1d(plain) else weight.flatten(1).sum(1)


class Fixed(Scaled):
    """Mixed into a module's class: weights that start at a multiple, a multiplier, and scalars.

    ``F(x) = W x + b`` becomes ``s (W (x + b1) + b) + b2``, computed as ``(s W) x + (s (b + b1 W 1) + b2)``: b1 and b2
    cost a sum over the weight. If a convolution pads with zeros, which get no b1, b1 is added to the input instead.

    Attributes:
        begins: by name, the factor on the stored tensors at first.
        pads: whether b1 is added to the input.
    """

    begins: dict[str, float]
    pads: bool

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = stored_in(self, BEFORE) if BEFORE in self._parameters else None
        if self.pads and before is not None:
            return super().forward(args[0] + before, *args[1:], **kwargs)
        return super().forward(*args, **kwargs)

    def whole_bias(self, stored: Tensor | None, *, padded: bool) -> Tensor | None:
        """Return the bias with all scalars in it; without ``padded``, b1 of a convolution that pads with zeros is left
        out.
        """
        before, behind = (stored_in(self, name) if name in self._parameters else None for name in (BEFORE, BEHIND))
        weight, bias = cast(Tensor, stored_in(self, "weight")), stored
        if before is not None and (padded or not self.pads):
            added = before * response(weight, self)
            bias = added if bias is None else bias + added
        if bias is not None and "weight" in self.scaled:
            bias = bias * self.scale_for("weight", weight).view(-1)
        if behind is not None:
            out = response(weight, self).shape
            bias = behind.expand(out) if bias is None else bias + behind
        return bias

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1], tuple(self.scaled), BEFORE in self._parameters), self.__dict__

    @property
    @override
    def undecayed(self) -> list[str]:
        return [*super().undecayed, *(name for name in (BEFORE, BEHIND) if name in self._parameters)]

    @override
    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            for name, factor in self.begins.items():
                tensor = self._parameters[name]
                if tensor is not None:
                    begin(tensor, factor)
            for name in (BEFORE, BEHIND):
                if name in self._parameters:
                    cast(Tensor, self._parameters[name]).zero_()

    @override
    def fold(self) -> Mapping[str, Tensor]:
        found = dict(super().fold())
        before, behind = self._parameters.get(BEFORE), self._parameters.get(BEHIND)
        scalars = [t for t in (before, behind) if t is not None]
        if not any(bool(t.any()) for t in scalars):
            return found
        if self.pads and before is not None and bool(before.any()):
            raise CannotFold(
                "the scalar before a convolution that pads with zeros is not added to the padding, so no bias can replace it."
                " Train with Fixup(biases=False), or keep the module and load its checkpoints into lightning_eff.apply(plain,"
                " Fixup(...))"
            )
        if self._parameters.get("bias") is None:
            raise CannotFold(
                "its scalars act as a bias, but the plain layer has none. Train with Fixup(biases=False), or keep the module"
                " and load its checkpoints into lightning_eff.apply(plain, Fixup(...))"
            )
        stored = cast(Tensor, self._parameters["bias"])
        found["bias"] = cast(Tensor, self.whole_bias(stored, padded=True)).to(stored.dtype)
        return found


def begin(tensor: Tensor, factor: float) -> None:
    """Set W <- factor W in place; a factor of zero also clears numbers that are not finite."""
    if factor == 0.0:
        tensor.zero_()
    else:
        tensor.mul_(factor)


def _bias(self: Fixed) -> Tensor | None:
    stored = stored_in(self, "bias")
    if not self._reading or (self.read_by_others and isinstance(stored_in(self, "weight"), DTensor)):
        return stored
    return self.whole_bias(stored, padded=False)


@functools.cache
def _fixed_class(cls: type[nn.Module], names: tuple[str, ...], biases: bool) -> type[Fixed]:
    members: dict[str, Any] = {"__module__": __name__, **{name: reader(name) for name in names}}
    if biases:
        members["bias"] = property(cast("Callable[[Any], Any]", _bias))
    return cast("type[Fixed]", type(f"Fixed{cls.__name__}", (Fixed, cls), members))


def _blank(cls: type[nn.Module], names: tuple[str, ...], biases: bool) -> Fixed:
    made = _fixed_class(cls, names, biases)
    return made.__new__(made)


def fixed(
    plain: nn.Module,
    tensors: dict[str, tuple[int, int]],
    *,
    begins: dict[str, float],
    biases: bool,
    branches: int,
    homes: dict[int, tuple[Scaled, str]],
    read_by_others: bool,
) -> Fixed:
    """Return a module with ``plain``'s class, settings and names, some of whose tensors start at a multiple.

    Args:
        plain: the module.
        tensors: its tensors that end a branch, as for
            :func:`~lightning_eff.model.initialization._scales.scaled.scaled`.
        begins: by name, the factor on its tensors; the products are new parameters.
        biases: whether scalars are added to input and output; only for linear layers and convolutions.
        branches: how many branches there are.
        homes: as for ``scaled``.
        read_by_others: as for ``scaled``.
    """
    made = _blank(type(plain), tuple(tensors), biases)
    scaled(
        plain,
        tensors,
        begins_at=1.0,
        sizes=[1] * branches,
        homes=homes,
        read_by_others=read_by_others,
        made=made,
    )
    made.begins = begins
    made.pads = isinstance(plain, CONVOLUTIONS) and plain.padding_mode == "zeros" and _pads(plain.padding)
    with torch.no_grad():
        for name, factor in begins.items():
            stored = made._parameters[name]
            if stored is not None:
                begin(own := nn.Parameter(stored.detach().clone(), stored.requires_grad), factor)
                made._parameters[name] = own
    if biases:
        for name in (BEFORE, BEHIND):
            made.register_parameter(name, nn.Parameter(torch.zeros(1)))
    return made


def _pads(padding: Any) -> bool:
    return padding != "valid" if isinstance(padding, str) else any(padding)
