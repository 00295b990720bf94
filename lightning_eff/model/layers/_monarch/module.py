"""A module that computes with two block-diagonal factors where a plain one has one weight."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.model.layers._monarch import factors


class MonarchLinear(nn.Module):
    """``Q L P R x + b`` instead of ``W x + b``; ``weight`` is the plain weight, computed from the factors at each access.

    Args:
        in_features: K.
        out_features: N.
        blocks: l and k, the numbers of classes of outputs and of runs of inputs; see ``factors``.
        rank: r, of each block.
        transposed: whether the plain weight has shape (K, N) instead of (N, K).
        bias: the plain module's bias, which becomes this module's parameter, or None.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        blocks: tuple[int, int],
        rank: int,
        *,
        transposed: bool,
        bias: nn.Parameter | None,
    ) -> None:
        super().__init__()
        classes, runs = blocks
        self.in_features, self.out_features, self.blocks, self.rank = in_features, out_features, blocks, rank
        self.transposed = transposed
        self.right = nn.Parameter(torch.empty(runs, classes * rank, in_features // runs))
        self.left = nn.Parameter(torch.empty(classes, out_features // classes, runs * rank))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors whose product has the variance of a new ``nn.Linear``'s weight, 1 / (3 K)."""
        runs, _, m = self.right.shape
        with torch.no_grad():
            self.right.normal_(0.0, m**-0.5)
            self.left.normal_(0.0, (3.0 * runs * self.rank) ** -0.5)

    def begin(self, matrix: Tensor) -> None:
        """Copy the factors nearest to a weight of shape (N, K)."""
        left, right = factors.project(matrix, self.blocks, self.rank)
        with torch.no_grad():
            self.left.copy_(left)
            self.right.copy_(right)

    @property
    def weight(self) -> Tensor:
        """The plain module's weight, as the product of the factors."""
        whole = factors.product(self.left, self.right).to(self.left.dtype)
        return whole.t() if self.transposed else whole

    def fold(self) -> Mapping[str, Tensor]:
        """The product in the plain weight's layout, and the bias."""
        found = {"weight": self.weight}
        return found if self.bias is None else {**found, "bias": self.bias}

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = factors.apply(x, self.left, self.right)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @override
    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, blocks={self.blocks}, rank={self.rank}"
