"""Frozen copies of a network, such as an EMA, get the new parameters that a technique gives the network."""

import copy
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_eff
from lightning_eff import LayerScale, LoRA, ReZero
from lightning_eff._core._architecture.twins import find_twins
from tests.cases import CASES
from tests.models import TinyGPT, loader, trainer


class Averaged(pl.LightningModule):
    """A network with an EMA and, further in, a target network, both paired with it by order."""

    def __init__(self) -> None:
        super().__init__()
        self.ema: nn.Module
        self.net = TinyGPT()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)
        self.held = nn.Module()
        self.held.target = copy.deepcopy(self.net).requires_grad_(False).eval()
        self.begins: list[bool] = []

    def copies(self) -> list[nn.Module]:
        return [self.ema, self.held.get_submodule("target")]

    def on_train_start(self) -> None:
        for one in self.copies():
            pairs = list(zip(one.named_parameters(), self.net.named_parameters(), strict=True))
            self.begins.append(all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            soft = self.ema(batch["input_ids"]).flatten(0, 1).softmax(-1)
        logits = self.net(batch["input_ids"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten()) + 0.1 * F.mse_loss(logits.softmax(-1), soft)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for q, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            q.lerp_(p, 0.1)
        if self.trainer.global_step % 3 == 0:
            self.held.get_submodule("target").load_state_dict(self.net.state_dict())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), 1e-2)


def averaged() -> Averaged:
    pl.seed_everything(1, verbose=False)
    return Averaged()


NAMES = ["ButterflyLinear", "Fixup", "HoulsbyAdapters", "LayerScale", "LoRA", "LogitSoftcap", "ReZero", "SkipInit"]


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_copy_is_changed_with_its_network(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, technique = averaged(), CASES[name].active()
    with caplog.at_level(logging.INFO):
        trained = trainer(technique, max_steps=4)
        trained.fit(module, loader("tiny_gpt"))
    said = [r.getMessage() for r in caplog.records if "is a frozen copy of net" in r.getMessage()]
    assert len(said) == 2 and said[0].startswith(f"{name}: ema is") and said[1].startswith(f"{name}: held.target is")
    assert module.begins == [True, True]
    for one in module.copies():
        assert not any(p.requires_grad for p in one.parameters())
        assert [*one.state_dict()] == [*module.net.state_dict()]
        one.load_state_dict(module.net.state_dict())
    assert not module.held.get_submodule("target").training and module.ema.training
    own = {id(p) for p in module.net.parameters()}
    assert not any(id(p) in own for one in module.copies() for p in one.parameters()), "a copy has its own parameters"
    again = averaged()
    lightning_eff.apply(again, CASES[name].active())
    again.load_state_dict(module.state_dict())


def test_a_run_with_a_frozen_copy_resumes_exactly(tmp_path: Path) -> None:
    def run(steps: int, path: Path | None = None) -> tuple[Averaged, pl.Trainer]:
        module = averaged()
        fitted = trainer(LayerScale(), max_steps=steps)
        fitted.fit(module, loader("tiny_gpt"), ckpt_path=path)
        return module, fitted

    run(3)[1].save_checkpoint(tmp_path / "3.ckpt")
    for p, q in zip(run(3)[0].parameters(), run(3, tmp_path / "3.ckpt")[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_export_gives_both_back_and_leaves_the_copy_frozen() -> None:
    module = averaged()
    trainer(LoRA(), max_steps=3).fit(module, loader("tiny_gpt"))
    plain = lightning_eff.export(module)
    assert [*plain.state_dict()] == [*averaged().state_dict()]
    assert not any(p.requires_grad for p in plain.ema.parameters())
    assert all(p.requires_grad for p in plain.net.parameters())


def test_what_fails_later_leaves_everything_as_it_was() -> None:
    class Fails(Averaged):
        def configure_optimizers(self) -> Any:
            assert any("scale" in name for name, _ in self.ema.named_parameters())
            raise RuntimeError("no optimizer")

    pl.seed_everything(1, verbose=False)
    module = Fails()
    module.tail = nn.Linear(2, 2)  # behind the copies, in whose order the tree is
    before = dict(module.named_modules())
    values = {name: p.clone() for name, p in module.named_parameters()}
    with pytest.raises(RuntimeError, match="no optimizer"):
        trainer(CASES["Fixup"].active(), max_steps=1).fit(module, loader("tiny_gpt"))
    assert dict(module.named_modules()) == before and [*dict(module.named_modules())] == [*before]
    for name, p in module.ema.named_parameters():
        assert torch.equal(p, values[f"ema.{name}"])


def test_a_copy_of_which_code_keeps_the_order_stays_in_its_place() -> None:
    module = averaged()
    names = [name for name, _ in module.named_children()]
    lightning_eff.apply(module, ReZero())
    assert [name for name, _ in module.named_children()] == names
    assert "ema" not in vars(module)


def test_a_teacher_with_other_weights_is_left_alone() -> None:
    module = averaged()
    module.ema = TinyGPT().requires_grad_(False)
    assert [twin.at for twin in find_twins(module)] == ["held.target"]
    count = len(list(module.ema.parameters()))
    lightning_eff.apply(module, LayerScale())
    assert len(list(module.ema.parameters())) == count


def test_norms_that_are_alike_as_they_begin_are_no_copies() -> None:
    module = nn.Module()
    module.a, module.b = nn.LayerNorm(8), nn.LayerNorm(8).requires_grad_(False)
    module.c = nn.Linear(8, 8)
    assert not find_twins(module)
    module.d = copy.deepcopy(module.c).requires_grad_(False)
    assert [(twin.path, twin.at) for twin in find_twins(module)] == [("c", "d")]
    module.c.requires_grad_(False)
    assert not find_twins(module), "neither is the one that trains"


def test_each_target_belongs_to_its_own_critic() -> None:
    module = nn.Module()
    module.one, module.two = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(2))
    module.target_two = copy.deepcopy(module.two).requires_grad_(False)
    module.target_one = copy.deepcopy(module.one).requires_grad_(False)
    assert {(t.path, t.at) for t in find_twins(module)} == {("one", "target_one"), ("two", "target_two")}
    module.tied = nn.Sequential(module.target_one, nn.Identity())
    assert len(find_twins(module)) == 2


def test_the_network_alone_is_changed_as_the_message_says() -> None:
    class Alone(Averaged):
        def __init__(self) -> None:
            super().__init__()
            lightning_eff.apply(self.net, LayerScale())

        def on_train_batch_end(self, *args: Any) -> None:
            pass

        def on_train_start(self) -> None:
            pass

    pl.seed_everything(1, verbose=False)
    module = Alone()
    trainer(max_steps=2).fit(module, loader("tiny_gpt"))
    assert len([*module.net.parameters()]) > len([*module.ema.parameters()])


def test_values_that_a_change_brings_are_the_copys_too() -> None:
    module = nn.Module()
    module.c = nn.Linear(4, 4)
    module.d = copy.deepcopy(module.c).requires_grad_(False)
    (twin,) = find_twins(module)
    before = module.d.weight.clone()
    twin.note(module)
    module.c.weight.data.mul_(2)
    assert not twin.follow(), "there are no new parameters to tell of"
    assert torch.equal(module.d.weight, module.c.weight)
    twin.undo()
    assert torch.equal(module.d.weight, before)
