"""Controls of techniques that run fewer blocks: a shallower network throughout, and what it costs."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff import ProgressiveLayerDropping, ProgressiveStacking
from lightning_eff._core.technique import Technique
from lightning_eff.model.growth._shallower import Shallower
from lightning_eff.model.growth.progressive_layer_dropping import keep_probabilities, mean_kept, theta
from tests.cases import Case, no_blocks
from tests.models import TinyGPT, flat, loader, make_batch, module, trainer
from tests.runs import checkpoints, fit


def _half(num_blocks: int) -> float:
    return num_blocks / 2


CASES = {
    "Shallower": Case(
        active=lambda: Shallower(kept=_half),
        neutral=lambda: Shallower(kept=float),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    )
}

MODELS = ["tiny_gpt", "gpt2", "llama", "bert", "vit"]


def blocks_of(net: nn.Module) -> list[Any]:
    return next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList))


class Calls(pl.Callback):
    """How often each block was called, by step of training and of validation, and the extra passes."""

    def __init__(self) -> None:
        self.training: list[list[int]] = []
        self.validation: list[list[int]] = []
        self.extra_passes = -1
        self._now: list[int] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        def count(i: int) -> None:
            self._now[i] += 1

        self._handles = [
            block.register_forward_pre_hook(lambda *_, i=i: count(i)) for i, block in enumerate(blocks_of(pl_module))
        ]

    def on_train_batch_start(self, *args: Any) -> None:
        self._now = [0] * len(self._handles)
        self.training.append(self._now)

    def on_validation_batch_start(self, *args: Any) -> None:
        self._now = [0] * len(self._handles)
        self.validation.append(self._now)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        technique = next(c for c in trainer.callbacks if isinstance(c, Technique))
        self.extra_passes = technique.session.chain.cost.forward_passes

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for handle in self._handles:
            handle.remove()


def calls(technique: Technique, name: str = "tiny_gpt", *, num_layers: int = 4) -> Calls:
    """Four steps, with a validation after each second one."""
    found = Calls()
    settings: dict[str, Any] = {"max_steps": 4, "limit_val_batches": 1, "val_check_interval": 2}
    net = module(name, num_layers=num_layers)
    trainer(found, technique, **settings).fit(net, loader(name), loader(name, 4))
    assert len(found.training) == 4 and len(found.validation) >= 2
    return found


def test_rounds_and_keeps_one() -> None:
    for kept, expected in ((0.2, 1), (1.4, 1), (1.6, 2), (2.5, 2), (2.6, 3), (4.0, 4)):
        found = calls(Shallower(kept=lambda _, kept=kept: kept))
        for step in (*found.training, *found.validation):
            assert step == [int(i < expected) for i in range(4)]
        assert found.extra_passes == 0


@pytest.mark.parametrize("name", MODELS)
def test_is_exactly_the_shallow_model(name: str) -> None:
    """A fit of 2 blocks of 4 is that of the model built with 2, bit for bit, and its validation, at the same FLOPs."""
    pl.seed_everything(1, verbose=False)
    deep, shallow = module(name, num_layers=4), module(name, num_layers=2)
    shallow.load_state_dict({k: v for k, v in deep.state_dict().items() if k in shallow.state_dict()})
    first = copy.deepcopy(deep.state_dict())
    losses, flops = [], []
    for net, techniques in ((deep, [Shallower(kept=lambda n: n / 2)]), (shallow, [])):
        pl.seed_everything(2, verbose=False)
        counter = FlopCounterMode(display=False)
        t = trainer(*techniques, max_steps=6, limit_val_batches=1)
        with counter:
            t.fit(net, loader(name), loader(name, 4, shuffle=False, seed=5))
        losses.append(float(t.callback_metrics["val_loss"]))
        flops.append(counter.get_total_flops())
        (after,) = t.validate(net, loader(name, 4, shuffle=False, seed=5), verbose=False)
        losses.append(after["val_loss"])
    ours = deep.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in shallow.state_dict().items())
    untouched = [key for key in ours if key not in shallow.state_dict()]
    assert untouched and all(torch.equal(ours[key], first[key]) for key in untouched)
    assert losses[:2] == losses[2:], "in the fit, and after it"
    assert flops[0] == flops[1] > 0


def test_blocks_that_do_not_run_have_no_optimizer_state() -> None:
    net, t = fit("tiny_gpt", lambda: [Shallower(kept=lambda n: 3)])
    state = t.optimizers[0].state
    assert [any(p in state for p in block.parameters()) for block in blocks_of(net)] == [True, True, True, False]
    assert all(p.requires_grad for p in net.parameters())


def test_report_and_summary() -> None:
    technique = Shallower(kept=lambda n: 3)
    assert technique.summary() == "no block run"
    fit("tiny_gpt", lambda: [technique], max_steps=1)
    assert technique.report() == {"layers_active": 3, "layers_fraction": 0.75}
    assert technique.summary() == "the first 3 of 4 blocks of 'blocks', throughout"
    assert technique.name() == "shallower"


# -- the control of layer dropping


@pytest.mark.parametrize(("theta_min", "gamma"), [(0.5, 100.0), (0.3, 2.0), (0.9, 0.01), (0.1, 1e6)])
@pytest.mark.parametrize("num_blocks", [1, 2, 5, 12])
def test_mean_kept_is_the_mean_over_the_run(theta_min: float, gamma: float, num_blocks: int) -> None:
    n = 20_000  # midpoints
    grid = (theta((i + 0.5) / n, theta_min=theta_min, gamma=gamma) for i in range(n))
    by_hand = sum(sum(keep_probabilities(t, num_blocks=num_blocks)) for t in grid) / n
    assert mean_kept(num_blocks, theta_min=theta_min, gamma=gamma) == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize(("theta_min", "num_layers", "expected"), [(0.5, 12, 9), (0.1, 4, 2), (0.5, 2, 1), (0.9, 4, 4)])
def test_layer_dropping_is_held_against_its_mean_depth(theta_min: float, num_layers: int, expected: int) -> None:
    recipe = ProgressiveLayerDropping(theta_min=theta_min, layers="blocks")
    (name,) = arms = recipe.control.arms(recipe)
    arm = arms[name]
    assert name == "mean depth throughout"
    assert isinstance(arm, Shallower) and arm.layers == "blocks"
    assert pickle.loads(pickle.dumps(arm)).kept(num_layers) == arm.kept(num_layers)
    found = calls(arm, num_layers=num_layers)
    for step in (*found.training, *found.validation):
        assert step == [int(i < expected) for i in range(num_layers)]
    assert found.extra_passes == 0


def test_as_many_block_passes_as_layer_dropping() -> None:
    recipe = ProgressiveLayerDropping(theta_min=0.4, gamma=5.0)
    passes = []
    for technique in (recipe, *recipe.control.arms(recipe).values()):
        found = Calls()
        pl.seed_everything(3, verbose=False)
        net = TinyGPT(num_layers=8, dim=4)
        trainer(found, technique, max_steps=150).fit(net, loader("tiny_gpt", 2, 2))
        passes.append(sum(map(sum, found.training)) / 150)
    assert passes[1] == 6  # of 5.8 in expectation
    assert passes[0] == pytest.approx(mean_kept(8, theta_min=0.4, gamma=5.0), abs=0.35)
    assert round(mean_kept(8, theta_min=0.4, gamma=5.0)) == 6


def test_neutral_layer_dropping_has_no_arm() -> None:
    recipe = ProgressiveLayerDropping(theta_min=1.0)
    assert recipe.control.arms(recipe) == {}


# -- the control of stacking


def test_stacking_is_held_against_each_of_its_sizes() -> None:
    recipe = ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.5, 4)], layers="blocks", init="identity")
    arms = recipe.control.arms(recipe)
    assert list(arms) == ["1 block throughout", "2 blocks throughout"]
    for count, arm in zip((1, 2), arms.values(), strict=True):
        assert isinstance(arm, ProgressiveStacking)
        assert (arm.stages, arm.layers) == ([(0.0, count)], "blocks")
        assert not arm.neutral
        found = calls(arm)
        for step in (*found.training, *found.validation):
            assert step == [int(i < count) for i in range(4)]
        assert found.extra_passes == 0
        assert arm.summary() == f"{count} of 4 blocks of 'blocks'"
        assert arm.control.arms(arm) == {}


def test_stacking_that_does_not_grow_has_no_arm() -> None:
    recipe = ProgressiveStacking(stages=[(0.0, 4)])
    assert recipe.control.arms(recipe) == {}


# -- errors


@pytest.mark.parametrize("kept", [0.0, -1.0, 4.5, float("nan")])
def test_a_number_of_blocks_that_there_are_not(kept: float) -> None:
    with pytest.raises(ValueError, match=rf"kept\(4\) returned {kept}, which is not in \(0, 4\]"):
        fit("tiny_gpt", lambda: [Shallower(kept=lambda _: kept)])


def test_checkpoints_of_another_depth_are_refused(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [Shallower(kept=lambda n: 2)], directory=tmp_path / "two")
    fit("tiny_gpt", list, directory=tmp_path / "plain")
    two, plain = checkpoints(tmp_path / "two")[3], checkpoints(tmp_path / "plain")[3]
    with pytest.raises(ValueError, match=r"trained with 2 of 'blocks'.*, but this run trains the first 3"):
        fit("tiny_gpt", lambda: [Shallower(kept=lambda n: 3)], resume=two)
    with pytest.raises(ValueError, match=r"trained with 4 of 'blocks'.*, but this run trains the first 3"):
        fit("tiny_gpt", lambda: [Shallower(kept=lambda n: 3)], resume=plain)
    net, _ = fit("tiny_gpt", lambda: [Shallower(kept=lambda n: n)], resume=plain)
    assert flat(net).isfinite().all()


def test_does_not_train_beside_stacking() -> None:
    with pytest.raises(ValueError, match="cannot train together: both set how many blocks"):
        fit("tiny_gpt", lambda: [Shallower(kept=lambda n: 2), ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)])])


def test_a_fresh_trainer_evaluates_the_prefix() -> None:
    net = module("tiny_gpt")
    found = Calls()
    trainer(found, Shallower(kept=lambda n: 2), limit_val_batches=1).validate(net, loader("tiny_gpt"), verbose=False)
    assert found.validation == [[1, 1, 0, 0]]
    batch = make_batch("tiny_gpt")
    with torch.no_grad():
        assert net(batch["input_ids"]).shape == (4, 32, 61), "the whole network afterwards"
    assert len(blocks_of(net)) == 4
