"""Blocks that are in no list: every technique on blocks finds them, and trains as it does on a list."""

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_eff
from tests.cases import CASES
from tests.core.elsewhere import in_the_list, plain_and_elsewhere
from tests.models import loader, trainer

ON_BLOCKS = [name for name in CASES if "layers" in inspect.signature(getattr(lightning_eff, name).__init__).parameters]
OFF = {"ActivationCompression", "ActivationOffload"}  # that act on the whole step unless they are told otherwise


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def same(other: pl.LightningModule, plain: pl.LightningModule) -> None:
    weights = in_the_list(other.state_dict())
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())


def run(net: pl.LightningModule, technique: Any, name: str, *, steps: int = 12, **settings: Any) -> list[float]:
    losses = Losses()
    torch.manual_seed(1)
    fit = {key: settings.pop(key) for key in ("ckpt_path",) if key in settings}
    trainer(technique, losses, max_steps=steps, **settings).fit(net, loader(name, 48), **fit)
    return losses.seen


@pytest.mark.parametrize("name", ON_BLOCKS)
def test_every_technique_on_blocks_trains_as_on_a_list(name: str) -> None:
    case = CASES[name]
    for layout in ("attributes", "dict", "within") if case.model in ("tiny_gpt", "padded") else ("within",):
        plain, other = plain_and_elsewhere(case.model, layout)
        expected = run(plain, case.active(), case.model)
        assert run(other, case.active(), case.model) == expected, layout
        same(other, plain)
