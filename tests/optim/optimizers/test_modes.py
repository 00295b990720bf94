"""Optimizers that want ``train()`` and ``eval()`` in ReplaceOptimizer's place, against the same optimizer driven by hand."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import ExponentialMovingAverage, ReplaceOptimizer
from tests.models import trainer


class TwoPoints(torch.optim.SGD):
    """Gradient descent that trains at ``w`` and evaluates at ``2 w``; a step in the wrong mode is an error."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        self._turn(True, 0.5)

    def eval(self) -> None:
        self._turn(False, 2.0)

    @torch.no_grad()
    def _turn(self, mode: bool, factor: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for p in group["params"]:
                    p *= factor

    def step(self, closure: Any = None) -> Any:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("not in train mode")
        return super().step(closure)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()) for _ in range(2)])
        self.out = nn.Linear(4, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.out(self.blocks(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.training_step(batch, batch_idx).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


def run(net: Net, *callbacks: Any, ckpt: Any = None) -> Any:
    loader = DataLoader(TensorDataset(X), 4)
    t = trainer(*callbacks, max_epochs=2, max_steps=-1, limit_val_batches=1)
    t.fit(net, loader, loader, ckpt_path=ckpt)
    return t


class Save(pl.Callback):
    def __init__(self, home: Path) -> None:
        self.home = home

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.home / f"{trainer.global_step}.ckpt")


def test_it_evaluates_and_is_kept_at_the_weights_of_eval(tmp_path: Path) -> None:
    net, reference = Net(), Net()
    run(net, ReplaceOptimizer(TwoPoints), Save(tmp_path))
    blocks = list(reference.blocks.parameters())
    with torch.no_grad():  # a fresh TwoPoints is in eval mode, and train() halves the weights
        for p in blocks:
            p *= 0.5
    two, one = torch.optim.SGD(blocks, lr=0.1), torch.optim.SGD(reference.out.parameters(), lr=0.2)
    seen = []
    for step in range(6):
        reference.zero_grad()
        reference.training_step((X[step % 3 * 4 :][:4],), 0).backward()
        two.step()
        one.step()
        evaluated = copy.deepcopy(reference)
        with torch.no_grad():
            for p in evaluated.blocks.parameters():
                p *= 2
        state = torch.load(tmp_path / f"{step + 1}.ckpt", weights_only=True)["state_dict"]
        for name, value in evaluated.state_dict().items():
            torch.testing.assert_close(state[name], value)
        if step % 3 == 2:
            seen.append(evaluated.training_step((X[:4],), 0).item())
    assert net.seen == pytest.approx(seen)
    for name, value in evaluated.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)


def test_a_resumed_run_goes_on_as_the_undisturbed_one(tmp_path: Path) -> None:
    whole = Net()
    run(whole, ReplaceOptimizer(TwoPoints), Save(tmp_path))
    for step in (2, 3, 5):
        resumed = Net()
        run(resumed, ReplaceOptimizer(TwoPoints), ckpt=tmp_path / f"{step}.ckpt")
        assert all(torch.equal(value, resumed.state_dict()[key]) for key, value in whole.state_dict().items())


def test_a_module_that_drives_its_own_optimizer_reaches_it_beside_another() -> None:
    class Drives(Net):
        def on_train_epoch_start(self) -> None:
            self.optimizers().train()  # type: ignore[union-attr]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return TwoPoints(self.parameters(), lr=0.2)

    t = run(Drives(), ReplaceOptimizer(torch.optim.SGD, lr=0.1))
    (combined,) = t.optimizers
    for one in (combined, copy.deepcopy(combined), pickle.loads(pickle.dumps(combined))):
        one.eval()
        assert [g["train_mode"] for part in one.parts for g in part.param_groups if "train_mode" in g] == [False]
        with pytest.raises(AttributeError, match="TwoPoints and SGD has no 'nothing'"):
            one.nothing  # noqa: B018
        assert not hasattr(one, "_step_supports_amp_scaling")


def test_beside_an_average_it_is_refused() -> None:
    with pytest.raises(ValueError, match="ReplaceOptimizer and ExponentialMovingAverage cannot train together"):
        run(Net(), ReplaceOptimizer(TwoPoints), ExponentialMovingAverage(4))
