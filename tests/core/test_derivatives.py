"""Modules whose step takes derivatives by itself, as physics-informed ones do, and tensors of a class of their own."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import DataPruning, LayerScale, Rematerialization, SelectiveBackprop, SharpnessAwareMinimization
from lightning_eff._core.technique import Technique
from tests.models import trainer
from tests.runs import final_state


class Named(Tensor):
    """A tensor that knows its name. Some of its methods need the name, which torch's operations do not hand on."""

    label: str

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        found = super().requires_grad_(requires_grad)
        found.label = self.label
        return found


def named(x: Tensor, label: str) -> Tensor:
    found = x.as_subclass(Named)
    found.label = label
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert getattr(x, "label", "none") == ("x" if type(x) is Named else "none")
        return x + self.down(torch.tanh(self.up(x)))


class Flow(pl.LightningModule):
    """The gradient of a potential."""

    def __init__(self, names: bool = False) -> None:
        super().__init__()
        self.names, self.first, self.head = names, nn.Linear(2, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(named(x, "x") if self.names else x)
        return self.head(x.as_subclass(Tensor))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        if self.names:
            return nn.functional.mse_loss(self(x), batch[1][:, :1])
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return nn.functional.mse_loss(slope, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Branch(nn.Module):
    """``x + tanh(W x)``, which does not end in a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def run(*techniques: Technique, names: bool = False, block: type[nn.Module] = Block) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net, t = Flow(names), trainer(*techniques, max_steps=4)
    net.blocks = nn.ModuleList(block() for _ in range(3))
    data = TensorDataset(torch.randn(32, 2), torch.randn(32, 2))
    t.fit(net, DataLoader(data, 8))
    return final_state(net, t)


@pytest.mark.parametrize("technique", [SelectiveBackprop(), DataPruning(keep=0.5)], ids=lambda t: type(t).__name__)
def test_a_pass_for_the_loss_alone_is_refused_with_the_reason(technique: Technique) -> None:
    who = type(technique).__name__
    with pytest.raises(ValueError, match=rf"^{who}: Flow\.training_step takes derivatives by itself.* Remove {who}\.$"):
        run(technique)


def test_sums_of_derivatives_are_no_residual_branches() -> None:
    with pytest.raises(ValueError, match=r"^LayerScale: training_step takes derivatives by itself.*branches="):
        run(LayerScale(), block=Branch)


def test_passes_with_gradients_need_nothing_else() -> None:
    assert all(
        value.isfinite().all() for value in run(SharpnessAwareMinimization()).values() if isinstance(value, Tensor)
    )


def test_blocks_that_run_again_get_what_was_set_on_their_inputs() -> None:
    plain, again = run(names=True), run(Rematerialization(policy="full"), names=True)
    assert all(torch.equal(plain[key], again[key]) for key in plain if isinstance(plain[key], Tensor))
