"""Modules with a head of 300 classes, in as many ways as there are to compute and to use it; and what they train on."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

B, T, D, V = 4, 32, 8, 300
LOGITS = B * T * V

Head = Callable[["Net", Tensor], Tensor]
Loss = Callable[["Net", Tensor, Tensor], Tensor]


class Capped(nn.Linear):
    """A head with a forward of its own around that of ``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return 3.0 * torch.tanh(super().forward(input) / 3.0)


class Net(pl.LightningModule):
    """Tokens to logits (B, T, V) by ``head``, and their loss by ``loss``; what a variant does not use has no gradient."""

    def __init__(self, head: Head, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head, self.loss = head, loss
        self.embed, self.inner, self.out = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.capped = Capped(D, V)
        self.extra, self.scale = nn.Parameter(torch.randn(V)), nn.Parameter(torch.tensor(0.3))
        self.register_buffer("class_weight", torch.rand(V) + 0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.inner(self.embed(ids)).tanh()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self, self.hidden(ids))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self, self(batch["ids"]), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(batches: int = 1, share: float = 0.3, seed: int = 0) -> DataLoader[Any]:
    """Batches with this share of labels that count; the last token of each row's always does."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(batches):
        ids, labels = torch.randint(0, V, (B, T), generator=g), torch.randint(0, V, (B, T), generator=g)
        ignored = torch.rand(B, T, generator=g) >= share
        ignored[:, -1] = False
        found.append({"ids": ids, "labels": labels.masked_fill(ignored, -100)})
    return DataLoader(found, batch_size=None)


def flat(net: Net, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def module(net: Net, h: Tensor) -> Tensor:
    return net.out(h)


HEADS: dict[str, Head] = {
    "module": module,
    "tied": lambda net, h: F.linear(h, net.embed.weight),
    "product": lambda net, h: h @ net.embed.weight.T,
    "matmul": lambda net, h: torch.matmul(h.flatten(0, 1), net.embed.weight.t()).unflatten(0, (B, T)),
    "addmm": lambda net, h: torch.addmm(net.extra, h.view(-1, D), net.embed.weight.t()).view(B, T, V),
    "cap": lambda net, h: 3.0 * torch.tanh(net.out(h) / 3.0),
    "cap in steps": lambda net, h: (net.out(h) * 2).div(5).tanh().mul(2.5).float(),
    "cap within a subclass": lambda net, h: net.capped(h),
    "scale": lambda net, h: net.out(h) * 0.25,
    "learned scale": lambda net, h: net.scale.exp() * net.out(h),
    "learned scale, (1,)": lambda net, h: net.out(h) / net.scale.exp().view(1),
    "bias": lambda net, h: net.out(h) + net.extra,
    "bias before a cap": lambda net, h: ((net.out(h) * 0.7 + net.extra[None]) / 2).tanh() * 2,
}


def indexed(net: Net, z: Tensor, y: Tensor) -> Tensor:
    at = (y.flatten() != -100).nonzero().squeeze(1)
    return F.cross_entropy(z.flatten(0, 1)[torch.cat([at, at[:3]])], y.flatten()[torch.cat([at, at[:3]])])


def masked(net: Net, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[y != -100], y[y != -100])


def shifted(net: Net, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1))


def none(net: Net, z: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(z[:, 1:].transpose(1, 2), y[:, 1:], reduction="none")
    return (losses * torch.linspace(0.5, 1, T - 1)).sum() / 40


def by_sample(net: Net, z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(one, labels) for one, labels in zip(z.unbind(0), y, strict=True)]).mean()


LOSSES: dict[str, Loss] = {
    "shifted": shifted,
    "shifted, reshaped": lambda net, z, y: F.cross_entropy(z[:, :-1].reshape(-1, z.size(-1)), y[:, 1:].reshape(-1)),
    "transposed": lambda net, z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permuted": lambda net, z, y: F.cross_entropy(z.permute(0, 2, 1).contiguous(), y),
    "masked": masked,
    "indexed": indexed,
    "one token": lambda net, z, y: F.cross_entropy(z[torch.arange(B), -1], y[:, -1]),
    "smoothed": lambda net, z, y: F.cross_entropy(z.view(-1, V), y.view(-1), label_smoothing=0.1),
    "class weights": lambda net, z, y: F.cross_entropy(z.view(-1, V), y.view(-1), weight=net.class_weight),
    "sum": lambda net, z, y: F.cross_entropy(z.view(-1, V), y.view(-1), reduction="sum") / 17,
    "none": none,
    "another ignored": lambda net, z, y: F.cross_entropy(z.view(-1, V), y.clamp(min=7).view(-1), ignore_index=7),
    "chunks": lambda net, z, y: sum(flat(net, *two) for two in zip(z.chunk(4, 1), y.chunk(4, 1), strict=True)),  # pyright: ignore[reportReturnType]
    "two losses": lambda net, z, y: flat(net, z, y) + 0.5 * shifted(net, z, y),
    "module": lambda net, z, y: nn.CrossEntropyLoss(label_smoothing=0.2)(z.float().reshape(B * T, -1), y.reshape(-1)),
    "by sample": by_sample,
    "log_softmax": lambda net, z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten()),
    "modules": lambda net, z, y: (
        nn.NLLLoss(net.class_weight, reduction="sum")(nn.LogSoftmax(1)(z.transpose(1, 2)), y) / 9
    ),
}


class Largest(TorchDispatchMode):
    """The largest tensor that any operation has made, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(made) if isinstance(t, Tensor))])
        return made
