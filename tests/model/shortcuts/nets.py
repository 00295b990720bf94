"""A network whose blocks can be run by hand with connections between them, and ways in which modules recompute blocks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import VOCAB, TinyGPT

Tokens = tuple[Tensor, Tensor]


def net(layers: int = 5) -> TinyGPT:
    """A language model in float64, without dropout."""
    torch.manual_seed(0)
    return TinyGPT(layers, dropout=0.0).double()


def tokens() -> Tokens:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB, (2, 9), generator=g), torch.randint(0, VOCAB, (2, 9), generator=g)


def draw(module: nn.Module, *names: str) -> None:
    """Give the parameters of these names random values."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.rpartition(".")[2] in names:
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.5 + 0.5)


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each parameter, by name, and the loss."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, [*named.values()], retain_graph=True)
    return {"loss": loss.detach(), **dict(zip(named, found, strict=True))}


def alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13, msg=name)


def loss_of(module: Any, at: Tokens) -> Tensor:
    return F.cross_entropy(module(at[0]).flatten(0, 1), at[1].flatten())


def embedded(module: Any, ids: Tensor) -> Tensor:
    return module.embed(ids) + module.position.weight[: ids.shape[1]]


def headed(module: Any, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(module.head(module.norm(x)).flatten(0, 1), labels.flatten())


class Recomputed(TinyGPT):
    """Its blocks are recomputed in the backward pass, by a call around each.

    Args:
        call: what calls a block.
    """

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], layers: int = 4) -> None:
        super().__init__(layers, dropout=0.0)
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        x = embedded(self, ids)
        assert self.blocks is not None
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(self.norm(x))


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def again(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


def reentrantly(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)  # pyright: ignore[reportReturnType]


def in_place(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    x += 1.0
    return y
