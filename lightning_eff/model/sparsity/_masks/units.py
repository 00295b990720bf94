"""Units that are pruned together: BatchNorm's channels, attention's heads, and hidden units of feed-forward networks."""

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_eff._core._branches.attention import attentions
from lightning_eff._core._branches.ffns import find_ffns
from lightning_eff._core._branches.tracing import traced
from lightning_eff._core.session import Session
from lightning_eff.model.sparsity._masks.finding import Weight
from lightning_eff.model.sparsity._masks.two_of_four import axes_of


class Units(NamedTuple):
    """The units of one layer.

    Attributes:
        kind: "channel", "head" or "neuron".
        names: the parameters that hold them: a norm's scale and shift, or the weight that reads them.
        dim: the dimension of these parameters along which they are.
        number: the number of units.
        width: the number of neighbouring elements of that dimension per unit.
    """

    kind: str
    names: list[str]
    dim: int
    number: int
    width: int

    def spread(self, kept: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """The value in ``kept``, (number,), for each element of a parameter of this shape."""
        along = kept.repeat_interleave(self.width)
        return along.view([-1 if d == self.dim else 1 for d in range(len(shape))]).expand(shape).clone()

    def sums(self, values: Tensor) -> Tensor:
        """The sum of ``values``, which have the parameter's shape, over each unit: (number,)."""
        return values.movedim(self.dim, 0).reshape(self.number, -1).sum(1)


def channels(module: nn.Module, masked: Container[str] = ()) -> list[Units]:
    """The channels of all BatchNorms with trainable scales."""
    found: list[Units] = []
    names = {id(p): name for name, p in module.named_parameters()}
    for m in module.modules():
        if isinstance(m, _BatchNorm) and m.weight is not None and id(m.weight) in names:
            own = [names[id(p)] for p in (m.weight, m.bias) if p is not None]
            if m.weight.requires_grad or own[0] in masked:
                found.append(Units("channel", own, 0, m.weight.numel(), 1))
    return found


def heads_and_neurons(
    session: Session, batch: Any, batch_idx: int, weights: dict[str, Weight], *, who: str
) -> list[Units] | None:
    """The heads and hidden units that ``weights`` read; None for a batch that the step skips.

    It takes one forward pass and three backward passes, and leaves no trace.
    """
    graph = traced(session, batch, batch_idx, who=who)
    if graph is None:
        return None
    found: dict[str, Units] = {}
    for attention in attentions(graph):
        for name in attention.output:
            axes = (
                axes_of(session.module.get_submodule(name.rpartition(".")[0]), weights[name])
                if name in weights
                else None
            )
            if axes is None or attention.width is None or len(weights[name].shape) != 2:
                continue
            count, rest = divmod(weights[name].shape[axes[-1]], attention.width)
            if count and not rest:
                found[name] = Units("head", [name], axes[-1], count, attention.width)
    for ffn in find_ffns(graph)[0]:
        last = ffn.parts[-1]
        if last.name in weights and len(weights[last.name].shape) == 2 and last.groups == 1:
            found.setdefault(last.name, Units("neuron", [last.name], last.dim, ffn.hidden, 1))
    return [found[name] for name in weights if name in found]
