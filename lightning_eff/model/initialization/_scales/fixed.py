"""Maps with scalars of Fixup before and behind them, which are a part of their bias wherever that says the same."""

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
    """Whether ``plain`` is a linear map that holds its weight and bias itself. Others compute one of them."""
    held = plain._parameters.get("weight") is not None and "bias" in plain._parameters
    return held and (isinstance(plain, (nn.Linear, *CONVOLUTIONS)) or is_conv1d(plain))


def response(weight: Tensor, plain: nn.Module) -> Tensor:
    """``W 1``: what a map makes of an input that is one everywhere, without its bias; shape (N,)."""
    return weight.sum(0) if is_conv1d(plain) else weight.flatten(1).sum(1)


class Fixed(Scaled):
    """What a class of modules is made to have: weights that begin at a multiple, a multiplier, and scalars beside it.

    ``F(x) = W x + b`` becomes ``s (W (x + b1) + b) + b2``, computed as ``(s W) x + (s (b + b1 W 1) + b2)``: b1 and b2 cost
    a sum over the weight. Where a convolution pads with zeros, which get no b1, it is added to the input.

    Attributes:
        begins: by name, what the stored tensors are multiplied by at first.
        pads: b1 is added to the input.
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
        """The bias that has all scalars in it; without ``padded`` those before a padding with zeros are left out."""
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
                "the scalar before a convolution that pads with zeros is not added to the padding, as a bias behind would do."
                " Train with Fixup(biases=False), or keep the module as it is, and build it by lightning_eff.apply(plain,"
                " Fixup(...)) where its checkpoints are used"
            )
        if self._parameters.get("bias") is None:
            raise CannotFold(
                "what its scalars add is a bias, and the plain map has none. Train with Fixup(biases=False), or keep the module"
                " as it is, and build it by lightning_eff.apply(plain, Fixup(...)) where its checkpoints are used"
            )
        stored = cast(Tensor, self._parameters["bias"])
        found["bias"] = cast(Tensor, self.whole_bias(stored, padded=True)).to(stored.dtype)
        return found


def begin(tensor: Tensor, factor: float) -> None:
    """W <- factor W, in place; also where it is not finite, for a factor of zero."""
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
    """A module with ``plain``'s own class, settings and names, of which tensors begin at a multiple.

    Args:
        plain: the module.
        tensors: those of its own that end a branch, as of :func:`~lightning_eff.model.initialization._scales.scaled.scaled`.
        begins: by name, what its own tensors are multiplied by; the products are parameters of their own.
        biases: whether scalars are added before and behind; of maps alone.
        branches: how many there are.
        homes: as of ``scaled``.
        read_by_others: as of ``scaled``.
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
