"""Residual networks that the tests of growth share: stages of several widths without norms, and post-norm encoders."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import LENGTH, VOCAB


class Residual(nn.Module):
    """Two convolutions beside an identity, or beside a projection where the shape changes; no norms."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride=stride)
        nn.init.normal_(self.conv2.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.conv2(F.relu(self.conv1(x))))


class PlainResNet(pl.LightningModule):
    """Three stages of several blocks each, for the batches of ``vit``; the last two halve the image."""

    def __init__(self, depths: tuple[int, ...] = (3, 2, 2)) -> None:
        super().__init__()
        widths = [4 * 2**i for i in range(len(depths))]
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1)
        self.stages = nn.ModuleList()
        for i, depth in enumerate(depths):
            first = Residual(widths[max(i - 1, 0)], widths[i], stride=1 if i == 0 else 2)
            self.stages.append(nn.Sequential(first, *(Residual(widths[i], widths[i]) for _ in range(depth - 1))))
        self.head = nn.Linear(widths[-1], 5)

    def blocks(self) -> list[Any]:
        return [block for stage in self.stages for block in stage]  # pyright: ignore[reportGeneralTypeIssues]

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.stem(pixels))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["pixel_values"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


class PostNorm(pl.LightningModule):
    """``nn.TransformerEncoderLayer`` as torch makes it: post-norm, time first; for the batches of ``tiny_gpt``."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, 16), nn.Embedding(LENGTH, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCAB)

    def blocks(self) -> list[Any]:
        return list(self.encoder.layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.encoder(x.transpose(0, 1)).transpose(0, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
