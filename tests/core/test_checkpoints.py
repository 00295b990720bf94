"""Copies of a state that the background thread writes, and strategies for which there is none."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import nn

from lightning_eff import ExactResume
from lightning_eff._core._checkpoints.background import LightningSaves, refuse_deepspeed
from lightning_eff._core._checkpoints.staging import staged
from lightning_eff._core.patches import Patches
from lightning_eff.strategies.deep_speed import DeepSpeedEffStrategy
from tests.models import loader, module, trainer


class _Box:
    def __init__(self, values: list[int]) -> None:
        self.values = values


def test_a_copy_shares_nothing() -> None:
    weight, flat = torch.arange(6.0).view(2, 3), torch.arange(4.0)
    leaf = torch.ones(2, requires_grad=True)
    state: dict[str, Any] = {
        "nested": [{"weight": weight}, (flat[1:3], {"steps": 3})],
        "parameter": nn.Parameter(torch.zeros(2)),
        "leaf": leaf,
        "set": {1, 2},
        "box": _Box([1]),
        "empty": torch.empty(0),
    }
    copied = staged(state)
    weight += 1
    flat += 1
    state["parameter"].data += 1
    leaf.data += 1
    state["set"].add(3)
    state["box"].values.append(2)
    state["nested"][1][1]["steps"] = 4
    assert copied["nested"][0]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copied["nested"][1][0].tolist() == [1, 2] and copied["nested"][1][1] == {"steps": 3}
    assert isinstance(copied["nested"][1], tuple)
    assert isinstance(copied["parameter"], nn.Parameter) and copied["parameter"].tolist() == [0, 0]
    assert copied["leaf"].requires_grad and copied["leaf"].tolist() == [1, 1]
    assert copied["set"] == {1, 2} and copied["box"].values == [1] and copied["empty"].numel() == 0


def test_a_view_is_copied_without_the_rest_of_its_memory() -> None:
    copied = staged({"row": torch.zeros(1000, 4)[7]})
    assert copied["row"].untyped_storage().nbytes() == 16


def test_tied_weights_are_copied_once() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    net["b"].weight = net["a"].weight
    copied = staged({"state_dict": net.state_dict()})["state_dict"]
    assert copied["a.weight"] is copied["b.weight"] is not net["a"].weight
    assert type(copied) is OrderedDict and copied._metadata == net.state_dict()._metadata  # type: ignore[attr-defined]


def _with_plugin(strategy: Any) -> Any:
    strategy._checkpoint_io = AsyncCheckpointIO()
    return strategy


@pytest.mark.parametrize("cls", [DeepSpeedEffStrategy, DeepSpeedStrategy])
def test_deepspeed_is_refused(cls: type) -> None:
    strategy = _with_plugin(cls.__new__(cls))
    told = (
        rf"AsyncCheckpointIO\(\)\]\): under {cls.__name__}, DeepSpeed writes checkpoints itself.* Remove the plugin, or"
    )
    with pytest.raises(ValueError, match=told):
        refuse_deepspeed(strategy)
    with pytest.raises(ValueError, match=told):
        LightningSaves(SimpleNamespace(strategy=strategy)).begin(Patches())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy._checkpoint_io = None
    refuse_deepspeed(strategy)


class _Own(ModelParallelStrategy):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...


def test_a_strategy_that_saves_by_itself_is_refused() -> None:
    saves = LightningSaves(SimpleNamespace(strategy=_with_plugin(_Own())))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"_Own\.save_checkpoint replaces that of ModelParallelStrategy"):
        saves.begin(Patches())
    LightningSaves(SimpleNamespace(strategy=_Own())).begin(Patches())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_other_strategies_are_left_alone() -> None:
    for strategy in (DDPStrategy(), ModelParallelStrategy()):
        patches = Patches()
        LightningSaves(SimpleNamespace(strategy=strategy)).begin(patches)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        assert not patches._undo
    t = trainer(ExactResume(), max_steps=2, plugins=[AsyncCheckpointIO()])
    t.fit(module("tiny_gpt"), loader("tiny_gpt", 20))
    assert not vars(t.strategy).keys() & {"save_checkpoint", "remove_checkpoint", "teardown"}
    assert isinstance(t, pl.Trainer)
