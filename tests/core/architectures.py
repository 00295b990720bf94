"""Two techniques that change an architecture, one that folds away and one that does not; they are of the tests alone."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import choose, is_conv1d
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core.technique import Control


class Adapted(nn.Module):
    """``x W^T + b + (alpha / r) x A^T B^T``; ``weight`` is the plain map's own, (N, K) or of a Conv1D (K, N)."""

    def __init__(self, plain: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        assert isinstance(plain.weight, nn.Parameter)
        self.weight, self.bias = plain.weight, plain.bias
        self.weight.requires_grad_(False)
        if isinstance(self.bias, nn.Parameter):
            self.bias.requires_grad_(False)
        self.transposed, self.scale = is_conv1d(plain), alpha / rank
        n, k = reversed(plain.weight.shape) if self.transposed else plain.weight.shape
        self.down, self.up = nn.Parameter(torch.randn(rank, k) / k**0.5), nn.Parameter(torch.zeros(n, rank))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.t() if self.transposed else self.weight
        return F.linear(x, w, self.bias) + self.scale * F.linear(F.linear(x, self.down), self.up)  # pyright: ignore[reportArgumentType]

    def fold(self) -> dict[str, Tensor]:
        added = (self.scale * self.up.float() @ self.down.float()).to(self.weight.dtype)
        tensors = {"weight": self.weight + (added.t() if self.transposed else added)}
        return tensors if self.bias is None else {**tensors, "bias": self.bias}  # pyright: ignore[reportReturnType]


class LowRankAdapter(Architecture):
    """Train ``A`` and ``B`` of rank ``rank`` beside each linear map that ``names`` meets, and nothing else of it."""

    saves = "optimizer state"
    paper = "after Hu et al. 2021"
    control = Control("of the tests alone: the baseline")
    change_at = Change.ADAPT

    def __init__(self, *, rank: int = 2, alpha: float = 4.0, names: Sequence[str] | None = None) -> None:
        self.rank, self.alpha, self.names = rank, alpha, names
        self._count = 0

    @property
    def neutral(self) -> bool:
        return self.rank == 0

    def change(self, surgeon: Surgeon) -> None:
        maps, left = choose(surgeon.root, self.names, who=type(self).__name__)
        chosen = {id(m.module) for m in maps}
        surgeon.leave(left)
        paths = surgeon.swap(
            lambda path, m: id(m) in chosen, lambda m: Adapted(m, self.rank, self.alpha), what="a linear map"
        )
        self._count = len(paths)

    def report(self) -> dict[str, Any]:
        return {"maps": self._count}

    def summary(self) -> str:
        return f"{self._count} linear maps have adapters"


class Halved(nn.Module):
    """A LayerNorm without bias, and with one scale for all features."""

    def __init__(self, plain: nn.LayerNorm) -> None:
        super().__init__()
        self.shape, self.eps = plain.normalized_shape, plain.eps
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, eps=self.eps) * self.scale


class ScalarNorm(Architecture):
    """Swap every LayerNorm for one with a single parameter."""

    saves = "nothing"
    paper = "none"
    control = Control("of the tests alone: the baseline")
    change_at = Change.SWAP
    stays = "one number takes the place of two vectors"

    def change(self, surgeon: Surgeon) -> None:
        surgeon.swap(
            lambda path, m: isinstance(m, nn.LayerNorm),
            lambda m: Halved(m),  # pyright: ignore[reportArgumentType]
            what="a LayerNorm",
        )


class BiasesOnly(Architecture):
    """Train biases alone."""

    saves = "optimizer state"
    paper = "after Ben Zaken et al. 2021"
    control = Control("of the tests alone: the baseline")
    change_at = Change.FREEZE

    def change(self, surgeon: Surgeon) -> None:
        surgeon.freeze(lambda name, p: not name.endswith("bias"))
