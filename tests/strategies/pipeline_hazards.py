"""Modules that a pipeline gets wrong if it is careless: plain code, as users write it."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

DIM, LENGTH, CLASSES = 8, 6, 4


class Layer(nn.Module):
    """A residual MLP on (B, T, DIM)."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x.transpose(1, 2)).transpose(1, 2)))))


class Plain(pl.LightningModule):
    """A stack of blocks between two linear layers, on ``{"x": (B, T, DIM), "y": (B,)}``."""

    block: Any = Layer

    def __init__(self, num_layers: int = 4, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(self.block(**kwargs) for _ in range(num_layers))
        self.leave = nn.Linear(DIM, CLASSES)

    def through(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(self.enter(x)).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"]), batch["y"])


def batch(size: int = 8, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, length, DIM, generator=g),
        "y": torch.randint(0, CLASSES, (size,), generator=g),
    }


class Headed(Plain):
    """More heads side by side than blocks that feed one another."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(self.enter(x))
        return self.leave(torch.stack([head(h) for head in self.heads]).mean(0).mean(1))


class Named(Plain):
    """Blocks that are attributes, found by their names."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__(num_layers)
        for i, block in enumerate(self.blocks):
            setattr(self, f"block_{i}", block)
        del self.blocks

    def through(self, h: Tensor) -> Tensor:
        return self.block_3(self.block_2(self.block_1(self.block_0(h))))


class Halves(Plain):
    """Blocks in two lists, one of which is in another module."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__(num_layers)
        self.lower, self.body = self.blocks[:2], nn.ModuleDict({"upper": self.blocks[2:]})
        del self.blocks

    def through(self, h: Tensor) -> Tensor:
        upper: Any = self.body["upper"]
        for block in (*self.lower, *upper):
            h = block(h)
        return h


class Noise(Plain):
    """Draws outside the blocks, before and after them, by torch and by Python's and NumPy's generators."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        import random

        import numpy as np

        h = self.enter(batch["x"]) * (1 + 0.1 * random.random())
        h = self.through(h + 0.1 * torch.randn_like(h) * np.random.rand())
        h = F.dropout(h.mean(1), 0.2, self.training)
        return F.cross_entropy(self.leave(h), batch["y"])


class Between(Plain):
    """Draws after the first block what the last is given."""

    class Layer(Layer):
        def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
            return super().forward(x if noise is None else x + noise)

    block = Layer

    def through(self, h: Tensor) -> Tensor:
        noise: Tensor | None = None
        for i, block in enumerate(self.blocks):
            h = block(h, noise=noise if i == 3 else None)
            noise = torch.randn_like(h) if i == 0 else noise
        return h


class Norms(Plain):
    """BatchNorm before, in and after the blocks."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.before, self.after = nn.BatchNorm1d(DIM), nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.through(self.before(self.enter(x).transpose(1, 2)).transpose(1, 2))
        return self.leave(self.after(h.mean(1)))


class Conditioned(Plain):
    """Blocks with keyword arguments and a learnt conditioning of all of them; they return tuples."""

    class Layer(Layer):
        def forward(self, *, cond: Tensor, hidden: Tensor, flag: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            assert flag
            return super().forward(hidden * cond[:, None]), None

    block = Layer

    def __init__(self) -> None:
        super().__init__()
        self.cond = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h, cond = self.enter(x), self.cond(x.mean(1))
        for block in self.blocks:
            h, none = block(hidden=h, cond=cond, flag=True)
            assert none is None
        return self.leave(h.mean(1))


class Second(Plain):
    """Blocks take the hidden state after a floating-point mask, which the micro-batch makes."""

    class Layer(Layer):
        def forward(self, mask: Tensor, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x * mask)

    block = Layer

    def forward(self, x: Tensor) -> Tensor:
        mask, h = (x > -1).to(x.dtype), self.enter(x)
        for block in self.blocks:
            h = block(mask, h)
        return self.leave(h.mean(1))


class Mixed(Plain):
    """A learnt share of the first hidden state is added before each block, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.linspace(0.1, 0.4, len(self.blocks)))

    def through(self, h: Tensor) -> Tensor:
        first = h
        h = h.clone()
        for i, block in enumerate(self.blocks):
            h = h + 0
            h += self.share[i] * first
            h = block(h)
        return h


class InPlace(Plain):
    """Blocks that add to their input in place."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.down(torch.tanh(self.up(x.clone())))
            x += y
            return x

    block = Layer


class Views(Plain):
    """Blocks that return contiguous views, as OPT's do."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(1).view(x.shape)

    block = Layer


class Checkpointed(Plain):
    """The user's own checkpoints around blocks."""

    reentrant = False

    def through(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return h


class Segmented(Plain):
    """One checkpoint around two blocks each."""

    def through(self, h: Tensor) -> Tensor:
        for i in range(0, len(self.blocks), 2):
            h = checkpoint(lambda x, i=i: self.blocks[i + 1](self.blocks[i](x)), h, use_reentrant=False)
        return h


class Inside(Plain):
    """Blocks that checkpoint themselves, reentrantly."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    block = Layer


class Shrinking(Plain):
    """Every block halves the sequence."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, ::2]

    block = Layer


class Acting(Plain):
    """A hook on the blocks changes what they return: harmless."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda m, args, out: 0.9 * torch.as_tensor(out))


class Unused(Plain):
    """Blocks that return a second tensor of which nothing is made."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.mean(-1)

    block = Layer

    def through(self, h: Tensor) -> Tensor:
        maps = []
        for block in self.blocks:
            h, found = block(h)
            maps.append(found)
        return h


class Spare(Plain):
    """A token in the place of those that a batch masks (as DINOv2 has), and a map of which nothing is made.

    The first batch, which the strategy looks at, masks none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token, self.never = nn.Parameter(torch.ones(DIM)), nn.Linear(DIM, DIM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        if "mask" in batch:
            x = torch.where(batch["mask"][..., None], self.token, x)
        return F.cross_entropy(self(x), batch["y"])


class Late(Plain):
    """A scale that the head always uses, and what enters the blocks in batches that say so alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.enter(batch["x"])
        h = self.through(h * self.scale if "scaled" in batch else h)
        return F.cross_entropy(self.leave(h.mean(1) * self.scale), batch["y"])


class Writes(Plain):
    """Scales its blocks' weights from outside (as RWKV does), by 1 in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for block in self.blocks:
                block.up.weight.mul_(1.0)
        return F.cross_entropy(self(batch["x"]), batch["y"])


class Shared(Plain):
    """All blocks hold one linear layer beside their own."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = self.blocks[0].down


class Detached(Plain):
    """A parameter outside the blocks acts without a gradient, on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(CLASSES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.offset.detach() + self.enter.weight.detach().mean()


class Logging(Plain):
    """Logs on every stage, in blocks, numbers and metrics; returns dicts and predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.mean = SumMetric(), MeanMetric()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("size", float(len(batch["y"])), reduce_fx="sum", batch_size=len(batch["y"]))
        self.log("largest", batch["x"].max(), reduce_fx="max")
        self.seen.update(len(batch["y"]))
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"double": 2 * loss, "one": 1.0})
        self.accuracy(logits, batch["y"])
        self.log("accuracy", self.accuracy)
        self.log("seen", self.seen)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["x"])
        self.log("val_loss", F.cross_entropy(logits, batch["y"]))
        return {"logits": logits, "names": ["a", "b"], "n": 3}


class Container(Plain):
    """Batches of any make: a pair of (x, [y, names]) and a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, rest), scale = batch
        y, names, mask = rest["y"], rest["names"], rest["mask"]
        assert len(names) == len(y) and all(name == f"s{int(v)}" for name, v in zip(names, y, strict=True))
        assert mask.shape == (LENGTH,)
        return scale * F.cross_entropy(self.leave((self.through(self.enter(x)) * mask[:, None]).mean(1)), y)


class Hooked(Plain):
    """A hook on the blocks collects an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(_Collects(self.found))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found.clear()
        return super().training_step(batch, batch_idx) + 0.01 * torch.stack(self.found).sum()


class _Collects:
    """A hook that a copy of its module has with a list of its own."""

    def __init__(self, found: list[Tensor]) -> None:
        self.found = found

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.found.append(output.pow(2).mean())
