"""Every optimizer that is exported, by its class path in the YAML of Lightning's own command line, with a scheduler."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_eff
from tests.models import flat, loader

#: of each a setting that is no default, and where it has a state
SETTINGS: dict[str, dict[str, Any]] = {
    "ACClip": {"alpha": 2.0},
    "APOLLO": {"rank": 2, "refresh_steps": 2},
    "Adan": {"betas": [0.9, 0.9, 0.9]},
    "GaLore": {"rank": 2, "refresh_steps": 2},
    "LAMB": {"eps": 1e-3},
    "LARS": {"trust": 0.02},
    "Lion": {"betas": [0.8, 0.98]},
    "Muon": {"momentum": 0.8},
    "SOAP": {"refresh_steps": 2},
    "Shampoo": {"root_steps": 1},
}


def test_none_is_left_out() -> None:
    exported = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
    assert {n for n, one in exported.items() if isinstance(one, type) and issubclass(one, Optimizer)} == set(SETTINGS)


class Plain(pl.LightningModule):
    """Without ``configure_optimizers``, which the command line brings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        return loader("classifier", 16, shuffle=False)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_it_is_named_in_the_command_lines_yaml(name: str, tmp_path: Path) -> None:
    """The run ends where a loop by hand does that makes the optimizer with the same settings."""
    settings = {"lr": 0.01, **SETTINGS[name]}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    config = {
        "optimizer": {"class_path": f"lightning_eff.{name}", "init_args": settings},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.5}},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", **dict.fromkeys(off, False)},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    cli = LightningCLI(Plain, args=["fit", "--config", str(path)], save_config_callback=None)
    by_hand = Plain()
    start = flat(by_hand).clone()
    optimizer = getattr(lightning_eff, name)(by_hand.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        for batch in by_hand.train_dataloader():
            optimizer.zero_grad()
            by_hand.training_step(batch, 0).backward()
            optimizer.step()
        scheduler.step()
    assert torch.equal(flat(cli.model), flat(by_hand)) and not torch.equal(flat(by_hand), start)
    (used,) = cli.trainer.optimizers
    key, value = next(iter(SETTINGS[name].items()))
    assert used.param_groups[0][key] in (value, tuple(value) if isinstance(value, list) else value)
