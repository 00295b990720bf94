"""64 residual blocks without norms: they diverge as PyTorch begins them, and train as these techniques do."""

import math

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import Fixup, ReZero, SkipInit, TFixup, ZerO
from lightning_eff._core.technique import Technique
from tests.models import trainer


class Block(nn.Module):
    """Two maps of He's scale around a ReLU, beside an identity: each doubles the stream's variance, more or less."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for m in (self.up, self.down):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Deep(pl.LightningModule):
    """64 blocks on 16 features of four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), *(Block(16) for _ in range(64)), nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.03)


def losses(*techniques: Technique) -> list[float]:
    torch.manual_seed(0)
    m, x = Deep(), torch.randn(64, 16)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()), 64)
    trainer(*techniques, max_steps=100).fit(m, data)
    return m.losses


@pytest.mark.slow
def test_as_it_is_it_diverges() -> None:
    found = losses()
    assert found[0] > 1e3 and not min(found[-5:]) < math.log(4)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [ReZero(), SkipInit(), Fixup()])
def test_it_trains(technique: Technique) -> None:
    found = losses(technique)
    assert found[0] < 3 and found[-1] < 0.6 * math.log(4)


@pytest.mark.slow
def test_it_trains_without_random_numbers() -> None:
    """The features themselves are the first logits: the head is a partial identity, and the first loss is no log 4."""
    found = losses(ZerO())
    assert found[0] < 4 and found[-1] < 0.1 * math.log(4)


class Layer(nn.Module):
    """Attention and an MLP of Xavier's scale, each beside an identity, as a transformer's layer without its norms."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        for m in (self.qkv, self.proj, self.up, self.down):
            nn.init.xavier_uniform_(m.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))


class Encoder(Deep):
    """64 layers on texts, under Adam without a warm-up, as the source of T-Fixup trains them: how often is there a 0?"""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(8, 16), *(Layer(16) for _ in range(64)))
        self.head = nn.Linear(16, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.net(batch[0]).mean(dim=1)), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def losses_of_texts(*techniques: Technique) -> list[float]:
    torch.manual_seed(0)
    m, x = Encoder(), torch.randint(0, 8, (32, 6))
    data = DataLoader(TensorDataset(x, (x == 0).sum(dim=1).clamp(max=3)), 32)
    trainer(*techniques, max_steps=40).fit(m, data)
    return m.losses


@pytest.mark.slow
def test_a_transformer_as_it_is_diverges() -> None:
    found = losses_of_texts()
    assert found[0] > 1e3 and not min(found[-5:]) < math.log(4)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [TFixup(), ZerO()])
def test_a_transformer_trains(technique: Technique) -> None:
    found = losses_of_texts(technique)
    assert found[0] < 3 and found[-1] < 0.3 * math.log(4)
