"""A linear layer that normalises those of its outputs that are heads of queries or keys."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

#: Added to the mean square.
EPS = 1e-6


def normed_heads(x: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    """``q / sqrt(mean(q^2) + eps) g`` for each head q of ``x``.

    Args:
        x: shape (..., heads * D), with the features of a head adjacent.
        gain: g, shape (D,).
        eps: > 0.
    """
    heads = x.unflatten(-1, (-1, gain.numel()))
    return F.rms_norm(heads, (gain.numel(),), gain.to(x.dtype), eps).flatten(-2)


class NormedHeads(nn.Module):
    """``W x + b`` with normalised heads of queries and keys, and one gain for queries and one for keys.

    Args:
        plain: the linear layer, which it contains.
        parts: by role, a mask of shape (out,) of the outputs that have it.
        width: the number of features of a head.
    """

    def __init__(self, plain: nn.Module, parts: Mapping[str, Tensor], width: int) -> None:
        super().__init__()
        self.map, self.roles = plain, list(parts)
        self.runs = {role: runs(mask) for role, mask in parts.items()}
        self.width, self.eps = width, EPS
        for role in parts:
            self.register_parameter(f"{role}_gain", nn.Parameter(torch.ones(width)))

    @property
    def undecayed(self) -> Sequence[str]:
        """The gains, which weight decay skips."""
        return [f"{role}_gain" for role in self.roles]

    @property
    def weight(self) -> Tensor:
        """The linear layer's weight."""
        return cast(Tensor, self.map.weight)

    @property
    def bias(self) -> Tensor | None:
        """The linear layer's bias."""
        return cast("Tensor | None", self.map.bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        pieces: list[tuple[int, Tensor]] = []
        covered: list[tuple[int, int]] = []
        for role in self.roles:
            gain = cast(Tensor, getattr(self, f"{role}_gain"))
            for start, stop in self.runs[role]:
                pieces.append((start, normed_heads(y[..., start:stop], gain, self.eps)))
                covered.append((start, stop))
        end = 0
        for start, stop in sorted(covered):
            if start > end:
                pieces.append((end, y[..., end:start]))
            end = stop
        if end < y.shape[-1]:
            pieces.append((end, y[..., end:]))
        made = [piece for _, piece in sorted(pieces, key=lambda one: one[0])]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    @override
    def extra_repr(self) -> str:
        return f"{', '.join(self.roles)} normalised in heads of {self.width}"


def runs(mask: Tensor) -> list[tuple[int, int]]:
    """The start and stop of each stretch of a mask of shape (n,) that is set."""
    found: list[tuple[int, int]] = []
    for i in mask.nonzero().flatten().tolist():
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found
