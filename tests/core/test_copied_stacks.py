"""Stacks in modules that hold copies of a network, lists of embeddings, or lists that no message may recommend."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import LayerFreezing, ProgressiveStacking, StochasticDepth
from lightning_eff._core._stack.finding import find_stack, find_stages
from tests.core.test_stacks import Adds, D, Network, fit


class Averaged(Network):
    """A network, and its moving average, which no step runs."""

    def __init__(self, copies: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adds() for _ in range(3))
        self.ema = nn.ModuleList(copy.deepcopy(self.blocks[0]) for _ in range(copies)).requires_grad_(False)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for block, average in zip(self.blocks, self.ema, strict=False):
            for p, q in zip(block.parameters(), average.parameters(), strict=True):
                q.lerp_(p.detach(), 0.1)


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_copies_that_stand_still_are_no_candidates(copies: int) -> None:
    module = Averaged(copies)
    assert find_stack(module, None, who="It").path == "blocks"
    assert [found.path for found in find_stages(module, None, who="It")] == ["blocks"]
    module.requires_grad_(False)
    assert len(find_stages(module, None, who="It")) == 2, "where none trains, each may be meant"


def test_a_frozen_stack_of_another_class_stays_a_candidate() -> None:
    module = Averaged(0)
    module.blocks.requires_grad_(False)
    module.towers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))
    assert find_stack(module, None, who="It").path == "blocks"


@pytest.mark.parametrize("layers", [None, ["blocks", "ema"]])
def test_freezing_acts_beside_a_copy_that_never_runs(layers: Any) -> None:
    technique = LayerFreezing(start=0.1, end=0.9, layers=layers)
    fit(Averaged(), technique, steps=8)
    assert technique.report()["blocks_frozen"] >= 2


class Bags(pl.LightningModule):
    """Tables of embeddings in a list, as in recommendation models."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.bags, self.out = nn.ModuleList(nn.EmbeddingBag(10, D) for _ in range(3)), nn.Linear(3 * D, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        ids = (batch[0].abs() * 3).long()
        each = torch.stack([bag(ids) for bag in self.bags])
        loss = nn.functional.mse_loss(self.out(torch.cat([each[0], each[1], each[2]], 1)), batch[1])
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(
    "technique",
    [
        StochasticDepth,
        lambda: LayerFreezing(start=0.1),
        lambda: ProgressiveStacking(stages=[(0.0, 1), (0.5, 2)]),
    ],
)
def test_tables_of_embeddings_are_no_stack(technique: Any, manual: bool) -> None:
    module = Bags(manual)
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(
        ValueError, match=r"given no floating-point tensor, so that no block feeds it|optimization=False"
    ):
        fit(module, technique())
    assert all(map(torch.equal, module.parameters(), before))


class Norm(nn.LayerNorm):
    """A list of these is a chain whose blocks add nothing."""


class Maps(Network):
    """Layers that add nothing, each with its norm: as in many networks of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(3))
        self.norms = nn.ModuleList(Norm(D) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + norm(conv(x))
        return x


def test_a_message_recommends_no_stack_that_is_refused_in_turn() -> None:
    with pytest.raises(ValueError, match=r"block 0 of 'convs' .* Remove StochasticDepth\.$"):
        fit(Maps(), StochasticDepth())


def test_an_error_in_a_step_by_hand_says_which_blocks_did_not_run() -> None:
    class ByHand(Averaged):
        def middle(self, x: Tensor) -> Tensor:
            blocks: Any = self.blocks
            return super().middle(x) + torch.stack([block.f.weight.mean() for block in blocks])[2]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer: Any = self.optimizers()
            optimizer.step()

    module = ByHand(0)
    module.automatic_optimization = False
    with pytest.raises(IndexError) as caught:
        fit(module, ProgressiveStacking(stages=[(0.0, 2), (0.5, 3)]))
    (note,) = caught.value.__notes__
    assert "2 of the 3 blocks" in note and note.endswith("remove ProgressiveStacking.")
