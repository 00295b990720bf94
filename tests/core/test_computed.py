"""Weights that layers compute: masks and initialisations act on the weight that is used, or say that they cannot."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from lightning_eff._core._architecture.computed import as_parameters, computed_weights
from tests.models import trainer

KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


def layer(kind: str) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older forms are deprecated
        return KINDS[kind](nn.Linear(32, 32))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = layer(kind), layer(kind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(kind), Block(kind)), nn.Linear(32, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


def loader() -> Any:
    g = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 32, generator=g), torch.randint(0, 5, (16,), generator=g)), 8)


@pytest.mark.parametrize(
    ("kind", "carrier"),
    [
        ("weight_norm", None),
        ("old weight_norm", None),
        ("spectral_norm", "parametrizations.weight.original"),
        ("old spectral_norm", "weight_orig"),
        ("orthogonal", None),
    ],
)
def test_whose_zeros_are_the_weights_zeros(kind: str, carrier: str | None) -> None:
    m = layer(kind)
    state = {name: t.clone() for name, t in m.state_dict().items()}
    (one,) = computed_weights(m)
    assert one.carrier() == carrier
    assert all(torch.equal(t, state[name]) for name, t in m.state_dict().items())


@pytest.mark.parametrize("kind", ["spectral_norm", "old spectral_norm"])
@pytest.mark.parametrize("technique", ["RigL", "SNIP"])
def test_masks_reach_the_weight_that_is_used(kind: str, technique: str) -> None:
    net = Net(kind)
    trainer(getattr(eff, technique)(sparsity=0.8), max_steps=2).fit(net, loader())
    net.eval().training_step(next(iter(loader())), 0)
    weights = [m.weight for block in net.blocks for m in (block.a, block.b)]  # pyright: ignore[reportAttributeAccessIssue, reportGeneralTypeIssues]
    zeros = torch.cat([(w == 0).flatten() for w in [*weights, net.head.weight]])
    assert float(zeros.float().mean()) == pytest.approx(0.8, abs=0.01)
    assert all(bool((w == 0).any()) for w in weights)


@pytest.mark.parametrize("kind", ["weight_norm", "old weight_norm", "orthogonal"])
def test_weights_that_cannot_be_masked_are_named(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"RigL: blocks.0.a.weight, .* cannot be masked"):
        trainer(eff.RigL(sparsity=0.8), max_steps=1).fit(Net(kind), loader())


@pytest.mark.parametrize("kind", ["weight_norm", "old weight_norm", "spectral_norm", "old spectral_norm"])
def test_an_initialization_sets_the_weight_that_is_used(kind: str) -> None:
    net = Net(kind)
    seen: list[Tensor] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.eval().training_step(batch, 0)
            seen.append(pl_module.blocks[0].a.weight.detach().clone())
            pl_module.train()

    names = [*net.state_dict()]
    trainer(eff.OrthogonalInit(), Look(), max_steps=1).fit(net, loader())
    torch.testing.assert_close(seen[0] @ seen[0].T, torch.eye(32), rtol=0, atol=2e-3)
    assert [*net.state_dict()] == names


def test_what_a_parametrization_cannot_give_is_named_and_stays() -> None:
    m = nn.Sequential(layer("spectral_norm"))
    state = {name: t.clone() for name, t in m.state_dict().items()}
    with torch.no_grad(), as_parameters(m) as left:
        dict(m.named_parameters())["0.weight"].mul_(3.0).add_(1.0)
    assert left == ["0.weight"]
    assert all(torch.equal(t, state[name]) for name, t in m.state_dict().items())
    with pytest.warns(UserWarning, match=r"LSUV: could not set blocks.0.a.weight, .* because a parametrization"):
        trainer(eff.LSUV(), max_steps=1).fit(Net("spectral_norm"), loader())
