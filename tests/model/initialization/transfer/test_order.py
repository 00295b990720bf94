"""Weights are set before another technique hides some of them, whatever the order of the callbacks."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_eff import CompoundGrowth, MuP
from tests.cases import case_of
from tests.models import TinyGPT, loader, module, trainer


class _First(pl.Callback):
    """The weights with which the first step is made."""

    weights: dict[str, Tensor]

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 0:
            self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}


def _fitted(*techniques: pl.Callback) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pl.seed_everything(1, verbose=False)
    net, first = module("tiny_gpt"), _First()
    trainer(*techniques, first, max_steps=6).fit(net, loader("tiny_gpt", 20))
    return first.weights, dict(net.named_parameters())


def _mup() -> MuP:
    return MuP(partial(TinyGPT, dim=8), attention="keep")


def test_hidden_units_that_wait_do_not_change_the_sizes_of_the_others() -> None:
    alone, _ = _fitted(_mup())
    plain, _ = _fitted()
    name = "blocks.0.mlp.2.weight"
    assert not torch.allclose(alone[name], plain[name], rtol=1e-3), "MuP changed nothing"

    def grown() -> CompoundGrowth:
        return CompoundGrowth(width=[(0.0, 0.25), (0.5, 1.0)])

    for techniques in ([_mup(), grown()], [grown(), _mup()]):
        weights, _ = _fitted(*techniques)
        shown = weights[name] != 0
        assert float(shown.float().mean()) == 0.25
        torch.testing.assert_close(weights[name][shown], alone[name][shown], rtol=1e-6, atol=0)


@pytest.mark.parametrize("other", ["AutoProg", "CompoundGrowth", "LotteryTickets", "RigL"])
def test_the_order_of_callbacks_does_not_matter(other: str) -> None:
    first = _fitted(_mup(), case_of(other).active())[1]
    last = _fitted(case_of(other).active(), _mup())[1]
    assert all(torch.equal(first[name], last[name]) for name in first)
