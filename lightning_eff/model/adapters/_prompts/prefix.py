"""Modules whose attention sees trained keys and values before those of its tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._attention.calls import Call
from lightning_eff._core._attention.inside import Inside, Place, put_inside

Init = Literal["normal", "zero"]
KEYS, VALUES, WEIGHT, BIAS = "prefix_keys", "prefix_values", "prefix_weight", "prefix_bias"
TRUNK = "prefix_trunk"


def prefixed_attention(call: Call, keys: Tensor, values: Tensor) -> Tensor:
    """Return ``softmax(Q [P_K; K]^T s) [P_V; V]`` for Q of L queries and P of k rows: every query sees all of P.

    Causal attention stays so, and keeps its kernel: k queries of zeros come first, and their results are dropped.

    Args:
        call: Q (B, H, L, E), K (B, H', S, E) and V (B, H', S, E'), with the mask and scale s.
        keys: P_K, (H', k, E).
        values: P_V, (H', k, E').
    """
    k = keys.shape[1]
    query, mask, causal = call.query, call.mask, call.causal
    size = len(call.key)
    key = torch.cat([keys.to(call.key.dtype).expand(size, -1, -1, -1), call.key], dim=2)
    value = torch.cat([values.to(call.value.dtype).expand(size, -1, -1, -1), call.value], dim=2)
    if mask is not None:
        if causal:  # torch takes one or the other
            seen = cast(Tensor, call.may_see())
            mask = seen if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)
            causal = False
        mask = mask.expand(*mask.shape[:-1], call.key.shape[2])
        mask = F.pad(mask, (k, 0), value=True if mask.dtype == torch.bool else 0.0)
    if causal:
        query = F.pad(query, (0, 0, k, 0))
    output = replace(call, query=query, key=key, value=value, mask=mask, causal=causal).run()
    return output[:, :, k:] if causal else output


class Trunk(nn.Module):
    """The part of the reparametrisation that all layers share: ``tanh(W P' + b)``, (k, hidden).

    Args:
        length: k.
        width: the number of features of P'.
        hidden: the number of rows of W.
    """

    def __init__(self, length: int, width: int, hidden: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(length, width))
        self.inner = nn.Linear(width, hidden)
        nn.init.normal_(self.rows)

    def reset_parameters(self) -> None:
        """Draw P' again."""
        nn.init.normal_(self.rows)

    @override
    def forward(self) -> Tensor:
        return self.inner(self.rows).tanh()


class Prefixed(Inside):
    """Attention with a prefix.

    Attributes:
        init: the initial prefix.
        shape: H', k, E and E'.
        times: the number of copies of each row.
    """

    prefix = "Prefixed"

    init: Init
    shape: tuple[int, int, int, int]
    times: int = 1

    @override
    def attends(self, call: Call) -> Tensor:
        keys, values = self.keys_and_values()
        if self.times > 1:
            keys, values = (t.repeat_interleave(self.times, dim=1) for t in (keys, values))
        return prefixed_attention(call, keys, values)

    @contextmanager
    def twice(self) -> Iterator[None]:
        """Use each row twice, as tokens are in the test of whether a block depends on positions."""
        self.times = 2
        try:
            yield
        finally:
            self.times = 1

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return P_K (H', k, E) and P_V (H', k, E')."""
        trunk = self.__dict__.get(TRUNK) or self._modules.get(TRUNK)
        if trunk is None:
            return cast(Tensor, self._parameters[KEYS]), cast(Tensor, self._parameters[VALUES])
        heads, _, e, e_v = self.shape
        weight = cast(Tensor, self._parameters[WEIGHT])
        # a copy of a block in another dtype has the trunk as it is
        found = F.linear(cast(nn.Module, trunk)().to(weight.dtype), weight, self._parameters[BIAS])
        keys, values = found.split([heads * e, heads * e_v], dim=-1)
        return keys.unflatten(-1, (heads, e)).transpose(0, 1), values.unflatten(-1, (heads, e_v)).transpose(0, 1)

    @override
    @torch.no_grad()
    def begin(self) -> None:
        for name in (KEYS, VALUES, WEIGHT, BIAS):
            p = self._parameters.get(name)
            if p is None:
                continue
            if self.init == "zero":
                p.zero_()
            elif name in (KEYS, VALUES):
                p.normal_()
            else:  # as torch begins a linear layer
                most = cast(Tensor, self._parameters[WEIGHT]).shape[1] ** -0.5
                p.uniform_(-most, most)


def prefixed(
    plain: nn.Module, place: Place, *, who: str, length: int, init: Init, trunk: Trunk | None, own: bool
) -> Prefixed:
    """Return a module with ``plain``'s class, parameters and settings, and a prefix.

    Args:
        plain: the module that attends.
        place: its call of attention.
        who: the technique's name.
        length: k.
        init: the initial prefix.
        trunk: the part of the reparametrisation that layers share; None trains the prefix itself.
        own: whether this module registers the trunk. The others only refer to it, so that checkpoints hold it once.
    """
    heads, e, e_v = place.call.key.shape[1], place.call.key.shape[3], place.call.value.shape[3]
    made = cast(Prefixed, put_inside(Prefixed, plain, who=who, init=init, shape=(heads, length, e, e_v)))
    if trunk is None:
        made.register_parameter(KEYS, nn.Parameter(torch.empty(heads, length, e)))
        made.register_parameter(VALUES, nn.Parameter(torch.empty(heads, length, e_v)))
    else:
        if own:
            made.add_module(TRUNK, trunk)
        else:
            made.__dict__[TRUNK] = trunk
        rows = heads * (e + e_v)
        made.register_parameter(WEIGHT, nn.Parameter(torch.empty(rows, trunk.inner.out_features)))
        made.register_parameter(BIAS, nn.Parameter(torch.empty(rows)))
    made.begin()
    return made
