"""Small vision transformers, hand-written and transformers', for the techniques that leave out or merge their tokens."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.vit.module import EncoderBlock
from tests.models import HuggingFace, make_batch, trainer

B, PATCHES, D = 4, 16, 24


class Net(pl.LightningModule):
    """Images (B, 1, 8, 8) in 16 patches through pre-norm blocks; special tokens and the head are for subclasses to say."""

    before, after = 1, 0

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(1, D, 2, 2)
        self.special = nn.Parameter(torch.randn(1, self.before + self.after, D))
        self.position = nn.Parameter(torch.randn(1, PATCHES, D))
        self.blocks = nn.ModuleList(EncoderBlock(D, 3, 0.0) for _ in range(num_layers))
        self.head = nn.Linear(D, 5)
        self.places: Tensor | None = None  # where a test says it, the patches that are computed, (B, k)
        self.lengths: list[int] = []

    def embed(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        if self.places is not None:
            x = torch.stack([row[at] for row, at in zip(x, self.places, strict=True)])
        special = self.special.expand(len(x), -1, -1)
        return torch.cat([special[:, : self.before], x, special[:, self.before :]], dim=1)

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
            self.lengths.append(x.shape[1])
        return self.head(self.pool(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["pixel_values"]), batch["labels"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MeanOfPatches(Net):
    before = 0

    def pool(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class MeanOfAll(Net):
    def pool(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class Registers(Net):
    """A class token and three registers in front, two behind; the class token beside the patches' mean."""

    before, after = 4, 2

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 0] + x[:, 4:-2].mean(dim=1) + x[:, -1]


class AttentionPool(Net):
    """A query of its own over the patches alone."""

    before = 0

    def pool(self, x: Tensor) -> Tensor:
        query = self.special.new_ones(len(x), 1, D)
        return F.scaled_dot_product_attention(query, x, x)[:, 0]


class Gradients(pl.Callback):
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = {name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None}


def gradients(net: pl.LightningModule, *callbacks: pl.Callback, batch: Any = None) -> dict[str, Tensor]:
    keep = Gradients()
    data = DataLoader([make_batch("vit", B) if batch is None else batch], batch_size=None)
    trainer(*callbacks, keep, max_steps=1).fit(net, data)
    return keep.found


def hugging_face(name: str = "vit", **more: Any) -> HuggingFace:
    """A classifier of three blocks without dropout, with the first weights of a seed.

    Args:
        name: vit, deit, dinov2 or dinov2_with_registers.
        more: other settings of its config.
    """
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "num_labels": 5,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **more,
    }
    torch.manual_seed(0)
    configs = {
        "vit": (hf.ViTForImageClassification, hf.ViTConfig),
        "deit": (hf.DeiTForImageClassification, hf.DeiTConfig),
        "dinov2": (hf.Dinov2ForImageClassification, hf.Dinov2Config),
        "dinov2_with_registers": (hf.Dinov2WithRegistersForImageClassification, hf.Dinov2WithRegistersConfig),
    }
    model, config = configs[name]
    return HuggingFace(model(config(**settings)).train())
