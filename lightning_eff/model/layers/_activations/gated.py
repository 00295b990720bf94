"""Turns a feed-forward network of two linear layers into a gated one of three: ``W_3 (SiLU(W_1 x) * W_2 x)``."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps
from lightning_eff._core._resume.marks import Marked
from lightning_eff.model.layers._activations.finding import Between
from lightning_eff.model.layers._activations.functions import ELEMENTWISE, GATED, NAMES, gated_width


class Activation(Marked):
    """One of the functions, with its name's mark in checkpoints.

    Args:
        to: the name of the function.
        device: the device of the mark.
    """

    def __init__(self, to: str, device: torch.device | None) -> None:
        super().__init__()
        self.to_ = to
        self.mark(float(NAMES.index(to)), to, device)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return {**ELEMENTWISE, **GATED}[self.to_](x)

    @override
    def extra_repr(self) -> str:
        return self.to_


class Gating(NamedTuple):
    """The parts of the networks that become gated, by the module's id.

    Attributes:
        first: layers that become ``W_1`` and ``W_2`` in one, with the new width.
        last: layers that become ``W_3``, with the new width.
        activations: the activations between them.
        left: by path, why an activation is left.
        before: the number of weights and biases before the change.
        after: the number of weights and biases after it.
    """

    first: dict[int, tuple[LinearMap, int]]
    last: dict[int, tuple[LinearMap, int]]
    activations: set[int]
    left: dict[str, str]
    before: int
    after: int

    def build(self, plain: nn.Module) -> nn.Linear:
        """The linear layer that replaces ``plain``."""
        if id(plain) in self.first:
            m, width = self.first[id(plain)]
            return _drawn(plain, m.in_features, 2 * width)
        m, width = self.last[id(plain)]
        return _drawn(plain, width, m.out_features)


def _drawn(plain: nn.Module, in_features: int, out_features: int) -> nn.Linear:
    """A linear layer with the standard deviation of the weights of ``plain``, and a bias of zeros if that has one."""
    new = nn.Linear(in_features, out_features, bias=plain.bias is not None)
    weight = plain.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        new.weight.normal_(0.0, 1.0).mul_(weight.std().to(new.weight.dtype))
        if new.bias is not None:
            new.bias.zero_()
    return new


def gating(root: nn.Module, activations: Mapping[str, nn.Module], seen: Mapping[str, Between], multiple: int) -> Gating:
    """Decide which linear layers become what.

    Args:
        root: the module tree.
        activations: the activations by path.
        seen: what a pass showed about each.
        multiple: the number that widths are a multiple of.
    """
    maps = {m.path: m for m in linear_maps(root)}
    users: dict[int, int] = {}
    for m in root.modules():
        for p in m.parameters(recurse=False):
            users[id(p)] = users.get(id(p), 0) + 1
    made = Gating({}, {}, set(), {}, 0, 0)
    before = after = 0
    for path, one in seen.items():
        first, last = [maps[p] for p in one.first], [maps[p] for p in one.last]
        width = {m.out_features for m in first} | {m.in_features for m in last}
        reason = one.odd
        taken = made.first.keys() | made.last.keys()
        if not reason and any(users[id(m.module.weight)] > 1 for m in (*first, *last)):
            reason = "another module shares the weight of a layer next to it"
        elif not reason and len(width) != 1:
            reason = "the layers before and after it have different widths"
        elif not reason and (
            any(id(m.module) in taken for m in (*first, *last)) or not one.first.keys().isdisjoint(one.last)
        ):
            reason = "another activation shares a layer next to it"
        if reason:
            made.left[path] = reason
            continue
        w = gated_width(width.pop(), multiple)
        made.first.update({id(m.module): (m, w) for m in first})
        made.last.update({id(m.module): (m, w) for m in last})
        made.activations.add(id(activations[path]))
        before += sum(p.numel() for m in (*first, *last) for p in m.module.parameters())
        after += sum((m.in_features + (m.module.bias is not None)) * 2 * w for m in first)
        after += sum((w + (m.module.bias is not None)) * m.out_features for m in last)
    return made._replace(before=before, after=after)
