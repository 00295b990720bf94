"""What a resumed run takes over, part by part and without a fit: pending callbacks, read arguments, settings, added groups."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_eff._core._resume.fit import restarts_exactly
from lightning_eff._core._resume.flags import Flags
from lightning_eff._core._resume.groups import AddedGroups
from lightning_eff._core._resume.position import calling_only, reads, with_state_keys
from lightning_eff._core.blocks import BlockStack, find_stack


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(2, 2), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)


def callbacks(*keys: str) -> list[Any]:
    return [SimpleNamespace(state_key=key, hook=lambda: None) for key in keys]


def test_of_several_callbacks_with_one_key_the_last_ones_are_pending() -> None:
    a, b, a2, a3 = callbacks("a", "b", "a", "a")
    assert with_state_keys([a, b, a2, a3], ["a", "a"]) == [a2, a3]
    assert with_state_keys([a, b, a2, a3], ["b", "gone"]) == [b]


def test_only_the_named_callbacks_are_called_and_all_are_put_back() -> None:
    a, b = callbacks("a", "b")
    trainer: Any = SimpleNamespace(callbacks=[a, b], lightning_module=SimpleNamespace(hook=print))
    with calling_only(trainer, "hook", [b], module=False):
        assert a.hook is None and callable(b.hook) and trainer.lightning_module.hook is None
    assert callable(a.hook) and trainer.lightning_module.hook is print
    with calling_only(trainer, "hook", [], module=True):
        assert trainer.lightning_module.hook is print


class Hooks:
    def ignores(self, trainer: Any, batch: Any) -> Any:
        return trainer

    def uses(self, trainer: Any, batch: Any) -> Any:
        return batch

    def hands_on(self, *args: Any) -> Any:
        return args

    def ignores_all(self, *args: Any) -> None:
        return None

    def in_a_closure(self, trainer: Any, batch: Any) -> Any:
        return lambda: batch

    def by_locals(self, trainer: Any, batch: Any) -> Any:
        return locals()["batch"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("ignores", False),
        ("uses", True),
        ("hands_on", True),
        ("ignores_all", False),
        ("in_a_closure", True),
        ("by_locals", True),
    ],
)
def test_an_argument_is_read_if_any_instruction_may_load_it(name: str, found: bool) -> None:
    assert reads(getattr(Hooks(), name), 1) is found


def test_a_callable_without_code_may_read_anything() -> None:
    assert reads(print, 1)


def test_settings_that_a_run_changed_are_changed_again_and_others_left() -> None:
    net, trainer = Net(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    flags = Flags(trainer, net)
    net.low.requires_grad_(False)
    net.high.eval()
    net.norm.track_running_stats = False
    trainer.accumulate_grad_batches = 4
    state = flags.state_dict()
    assert state["window"] == [1, 4] and sorted(state["requires_grad"]) == ["low.bias", "low.weight"]
    assert flags.state_dict({"high": True})["training"] == {}  # its mode outside of validation

    fresh, again = Net(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    fresh.high.requires_grad_(False)  # the user's change between the runs
    assert Flags(again, fresh).load_state_dict(state)
    assert [p.requires_grad for p in fresh.parameters()] == [False, False, False, False, True, True]
    assert not fresh.high.training and fresh.low.training and not fresh.norm.track_running_stats
    assert again.accumulate_grad_batches == 4
    assert not Flags(again, fresh).load_state_dict(state)  # nothing is left to change

    other = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, accumulate_grad_batches=2)
    Flags(other, Net()).load_state_dict(state)
    assert other.accumulate_grad_batches == 2  # another window than the first run began with


def test_added_groups_are_added_again_if_all_their_parameters_are_there() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.low.parameters(), lr=0.1)
    added = AddedGroups(net, [optimizer])
    assert added.state_dict() == [[]]
    optimizer.add_param_group({"params": [*net.high.parameters()], "lr": 0.5})
    (group,) = added.state_dict()[0]
    assert group["names"] == ["high.weight", "high.bias"] and group["settings"]["lr"] == 0.5

    fresh = Net()
    again = torch.optim.SGD(fresh.low.parameters(), lr=0.1)
    finetuning = SimpleNamespace(_internal_optimizer_metadata={}, _restarting=True)
    trainer: Any = SimpleNamespace(callbacks=[finetuning, SimpleNamespace()])
    unknown = {"names": ["high.weight", "gone"], "settings": {"lr": 0.3}}
    AddedGroups(fresh, [again]).load_state_dict([[unknown, group]], trainer)
    assert [g["lr"] for g in again.param_groups] == [0.1, 0.5]
    assert all(p is q for p, q in zip(again.param_groups[1]["params"], fresh.high.parameters(), strict=True))
    assert finetuning._restarting is False


def test_a_fit_begins_within_a_hook_only_where_its_rest_is_known() -> None:
    assert restarts_exactly({"hook": "on_train_batch_end"}) and restarts_exactly({"hook": "validation"})
    assert not restarts_exactly({"hook": "on_train_batch_start"}) and not restarts_exactly(None)


def test_what_techniques_freeze_is_left_to_them_and_what_the_user_froze_is_restored() -> None:
    def started() -> tuple[Flags, BlockStack, Any]:
        net: Any = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
        stack = BlockStack(find_stack(net, None, who="Test"))
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        return Flags(trainer, net, [stack]), stack, net

    flags, stack, net = started()
    net["blocks"][1].bias.requires_grad_(False)  # the user
    stack.held = [*net["blocks"].parameters()]
    stack.freeze_inactive()
    state = flags.state_dict()
    assert state["requires_grad"] == {"blocks.1.bias": False}

    fresh, stack, net = started()
    stack.held = [*net["blocks"][1].parameters()]
    stack.freeze_inactive()
    assert not fresh.load_state_dict(state)
    stack.thaw()
    assert [p.requires_grad for p in net.parameters()] == [True, True, True, False]
