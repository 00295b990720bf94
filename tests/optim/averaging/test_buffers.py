"""Buffers at averaged weights: spectral normalisation against singular values, and what no mean has a meaning of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import ExponentialMovingAverage, LatestWeightAveraging, StochasticWeightAveraging
from tests.models import trainer

AVERAGES: dict[str, Callable[[], Any]] = {
    "moving": lambda: ExponentialMovingAverage(6),
    "recomputed": lambda: ExponentialMovingAverage(6, batch_norm="recompute"),
    "stochastic": lambda: StochasticWeightAveraging(start=0.3, cycle=2),
    "latest": lambda: LatestWeightAveraging(interval=3),
}
NORMS = {"old": torch.nn.utils.spectral_norm, "new": torch.nn.utils.parametrizations.spectral_norm}

pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")


class Normed(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[m for _ in range(3) for m in (NORMS[kind](nn.Linear(8, 8)), nn.Tanh())])
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("codes", torch.zeros(4, 8))
        self.codes: Tensor
        self.shown: list[list[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.norm(self.net(batch[0]))
        self.count += 1
        self.mask[int(self.count) % 3] = int(self.count) % 2
        self.codes[int(self.count) % 4] = h[0].detach()
        return F.cross_entropy(self.out(h), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.shown.append([layer.weight.detach().clone() for layer in self.net[::2]])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-2)


def data(shuffle: bool = True) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 8, generator=g), torch.randint(0, 3, (32,), generator=g)
    return DataLoader(TensorDataset(x, y), 8, shuffle=shuffle)


def run(kind: str, *callbacks: Any, ckpt: Any = None) -> Normed:
    pl.seed_everything(1, verbose=False)
    net = Normed(kind)
    t = trainer(*callbacks, max_epochs=3, max_steps=-1, limit_val_batches=1)
    t.fit(net, data(), data(shuffle=False), ckpt_path=ckpt)
    return net


@pytest.mark.parametrize("kind", sorted(NORMS))
@pytest.mark.parametrize("name", sorted(AVERAGES))
def test_averaged_weights_have_spectral_norm_one(name: str, kind: str) -> None:
    net = run(kind, AVERAGES[name]()).eval()
    key = "weight_orig" if kind == "old" else "parametrizations.weight.original"
    for i, shown in zip((0, 2, 4), net.shown[-1], strict=True):
        averaged = net.state_dict()[f"net.{i}.{key}"]
        torch.testing.assert_close(shown, averaged / torch.linalg.svdvals(averaged)[0], rtol=1e-3, atol=1e-4)
    plain = Normed(kind)
    plain.load_state_dict(net.state_dict())
    plain.eval().net(torch.ones(1, 8))
    for layer, shown in zip(plain.net[::2], net.shown[-1], strict=True):
        assert torch.equal(layer.weight, shown)


@pytest.mark.parametrize("name", ["moving", "latest"])
def test_a_resumed_run_iterates_from_the_trained_vectors(name: str, tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    whole = run("new", AVERAGES[name](), Save()).state_dict()
    for step in (3, 6):
        resumed = run("new", AVERAGES[name](), ckpt=tmp_path / f"{step}.ckpt").state_dict()
        assert all(torch.equal(value, resumed[key]) for key, value in whole.items())


@pytest.mark.parametrize("name", sorted(AVERAGES))
def test_other_buffers_are_as_training_left_them(name: str) -> None:
    class Last(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.seen = {key: pl_module.get_buffer(key).clone() for key in ("count", "mask", "codes")}

    last = Last()
    net = run("new", AVERAGES[name](), last)
    assert float(net.get_buffer("count")) == 12
    assert all(torch.equal(net.get_buffer(key), value) for key, value in last.seen.items())
