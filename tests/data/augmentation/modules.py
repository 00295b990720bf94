"""Modules and data for augmentations: images and texts, integer labels, and losses of several kinds."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.data.augmentation._mixing import Mixing
from tests.cases import classifier
from tests.families import Residual
from tests.models import HuggingFace, make_batch, trainer

CLASSES, SIDE, SIZE = 4, 8, 6
_NO_IMAGES = "found no images in the batch"
#: Of the case of a technique that acts on images alone.
ON_IMAGES: dict[str, Any] = {
    "model": "vit",
    "refuses": dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt", "padded", "translator"), _NO_IMAGES),
    "lost": (classifier, "classifier", _NO_IMAGES),
}
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])


class ResNet(pl.LightningModule):
    """A small residual network with BatchNorm on (images, labels): (B, 1, 8, 8) and (B,). Remembers what it was given."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8))
        self.head = nn.Linear(8, CLASSES)
        self.lr = lr
        self.given: list[Any] = []
        self.evaluated: list[Any] = []
        self.losses: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given.append(batch)
        loss = self.loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(batch)
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Own(ResNet):
    """With any loss of (scores, labels), and without BatchNorm."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.own = loss

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return self.own(z, y)


class Ids(pl.LightningModule):
    """Classifies texts: (B, T) ids and (B,) labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.embed(batch["input_ids"]).mean(1)), batch["labels"])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Labelled(HuggingFace):
    """A Hugging Face model with ``labels=`` on (images, labels), that remembers what it was given."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.given: list[Any] = []
        self.losses: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given.append(batch)
        loss = self.model(pixel_values=batch[0], labels=batch[1]).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def vit() -> Labelled:
    torch.manual_seed(0)
    config = hf.ViTConfig(hidden_size=12, num_attention_heads=2, num_hidden_layers=2, intermediate_size=12)
    config.image_size, config.patch_size, config.num_channels, config.num_labels = SIDE, 2, 1, CLASSES
    model = hf.ViTForImageClassification(config)
    model.train()
    return Labelled(model)


def conv_next() -> Labelled:
    torch.manual_seed(0)
    config = hf.ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, patch_size=2)
    config.image_size, config.num_channels, config.num_labels = SIDE, 1, CLASSES
    model = hf.ConvNextForImageClassification(config)
    model.train()
    return Labelled(model)


def codes(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).float()


def _by_row(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none").sum() / len(y)


#: Losses as modules write them, and what each is on soft targets (B, C), written out.
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "cross-entropy": (F.cross_entropy, lambda z, p: -(p * z.log_softmax(-1)).sum(-1).mean()),
    "module": (nn.CrossEntropyLoss(), lambda z, p: -(p * z.log_softmax(-1)).sum(-1).mean()),
    "sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum"), lambda z, p: -(p * z.log_softmax(-1)).sum()),
    "rows": (_by_row, lambda z, p: -(p * z.log_softmax(-1)).sum(-1).mean()),
    "smoothed": (
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.2),
        lambda z, p: -((0.8 * p + 0.2 / CLASSES) * z.log_softmax(-1)).sum(-1).mean(),
    ),
    "weights, sum": (
        lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS, reduction="sum"),
        lambda z, p: -(p * WEIGHTS * z.log_softmax(-1)).sum(),
    ),
    "nll": (lambda z, y: F.nll_loss(z.log_softmax(-1), y), lambda z, p: -(p * z.log_softmax(-1)).sum(-1).mean()),
    "binary": (
        lambda z, y: F.binary_cross_entropy_with_logits(z, codes(y)),
        lambda z, p: -(p * F.logsigmoid(z) + (1 - p) * F.logsigmoid(-z)).mean(),
    ),
    "probabilities": (
        lambda z, y: F.binary_cross_entropy(z.sigmoid(), codes(y)),
        lambda z, p: -(p * F.logsigmoid(z) + (1 - p) * F.logsigmoid(-z)).mean(),
    ),
    "two": (
        lambda z, y: F.cross_entropy(z, y) + 0.3 * F.cross_entropy(2 * z, y),
        lambda z, p: -(p * (z.log_softmax(-1) + 0.3 * (2 * z).log_softmax(-1))).sum(-1).mean(),
    ),
}


def batches(count: int = 1, seed: int = 1) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(SIZE, 1, SIDE, SIDE, generator=g), torch.randint(0, CLASSES, (SIZE,), generator=g))
        for _ in range(count)
    ]


def train(net: Any, *callbacks: pl.Callback, data: Any = None, **kwargs: Any) -> Any:
    data = batches() if data is None else data
    run = trainer(*callbacks, **{"max_steps": len(data), **kwargs})
    loader = DataLoader(data, batch_size=None)
    run.fit(net, loader, loader if kwargs.get("limit_val_batches") else None)
    return net


class Spied:
    """What a technique mixed: the partners and the shares of each batch, and how often."""

    def __init__(self, technique: Mixing) -> None:
        self.partners: list[Tensor] = []
        self.shares: list[Tensor] = []
        compose = technique.compose

        def spy(inputs: list[Tensor], size: int, generator: torch.Generator) -> Any:
            made = compose(inputs, size, generator)
            self.partners.append(made[1])
            self.shares.append(made[2])
            return made

        technique.compose = spy

    def targets(self, at: int, y: Tensor) -> Tensor:
        """The mixed targets of a batch with the labels ``y``, (B, C)."""
        share, partner = self.shares[at], self.partners[at]
        if share.ndim == 2:  # of several others
            return (share[:, :1] * codes(y)) + (share[:, 1:, None] * codes(y[partner])).sum(dim=1)
        return share[:, None] * codes(y) + (1 - share[:, None]) * codes(y[partner])


class _Gradient(pl.Callback):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).clone())


def check_exact(
    net: Any, technique: Mixing, soft: Callable[[Tensor, Tensor], Tensor], *, larger_first: bool = True
) -> None:
    """Loss and gradient of a mixed step are those on the mixed targets, written out, and one pass was run for them."""
    twin, spied, gradient = copy.deepcopy(net), Spied(technique), _Gradient()
    forward = net.forward
    train(net, technique, gradient)
    images, labels = net.given[-1]
    y = batches()[0][1]
    assert torch.equal(labels, y) and not torch.equal(images, batches()[0][0])
    assert len(spied.shares) == 1 and 0.5 * larger_first <= float(spied.shares[0].min()) < 1
    loss = soft(twin(images), spied.targets(0, y))
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert abs(net.losses[-1] - loss.item()) < 1e-5 * max(1.0, abs(loss.item()))
    torch.testing.assert_close(gradient.found[0], expected, rtol=1e-4, atol=1e-6)
    assert net.forward == forward


class Pictures(pl.LightningDataModule):
    """What :class:`ResNet` trains on."""

    def train_dataloader(self) -> Any:
        return DataLoader(batches(4), batch_size=None)


class Texts(pl.LightningDataModule):
    """What :class:`~tests.models.TinyGPT` trains on."""

    def train_dataloader(self) -> Any:
        return DataLoader([make_batch("tiny_gpt", seed=k) for k in range(4)], batch_size=None)


def chi_squared(counts: Tensor, expected: Tensor) -> float:
    """``sum (n - e)^2 / e``, in standard deviations from its mean, for as many free counts as there are but one."""
    free = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum().sub(free) / (2 * free) ** 0.5)
