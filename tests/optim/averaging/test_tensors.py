"""Averages walk the module tree only when it has changed, and checkpoints hold an average once."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from lightning_eff import (
    ExponentialMovingAverage,
    LatestWeightAveraging,
    Lookahead,
    RegularizedNonlinearAcceleration,
    ScheduleFree,
    StochasticWeightAveraging,
)
from lightning_eff._core._optim.chunks import chunk_size
from lightning_eff._core._optim.tensors import Tensors
from lightning_eff.optim.averaging._shared import share
from lightning_eff.optim.averaging.exponential_moving_average import move_average
from tests.models import TinyClassifier, loader, trainer
from tests.optim.watch import state_of
from tests.runs import checkpoints, fit

AVERAGES: dict[str, Callable[[], Any]] = {
    "ExponentialMovingAverage": lambda: ExponentialMovingAverage(3.0),
    "recomputed": lambda: ExponentialMovingAverage(3.0, batch_norm="recompute"),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(start=0.0, cycle=1),
    "LatestWeightAveraging": lambda: LatestWeightAveraging(3, interval=1),
    "RegularizedNonlinearAcceleration": lambda: RegularizedNonlinearAcceleration(3, interval=1),
    "Lookahead": lambda: Lookahead(2),
    "ScheduleFree": lambda: ScheduleFree(0.9),
}


class Walks:
    """Counts walks of the tree of ``root``, while ``on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root: nn.Module | None = None
        self.count, self.on = 0, False
        walk = nn.Module.named_modules

        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.count += self.on and module is self.root
            return walk(module, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "named_modules", counted)


@pytest.mark.parametrize("name", sorted(AVERAGES))
def test_a_step_walks_no_tree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walks, technique = Walks(monkeypatch), AVERAGES[name]()
    walks.root = net = TinyClassifier()
    for hook in ("on_batch_start", "on_batch_end"):
        own = getattr(technique, hook)

        def watched(session: Any, *args: Any, own: Any = own) -> None:
            walks.on = session.trainer.global_step >= 2
            own(session, *args)
            walks.on = False

        monkeypatch.setattr(technique, hook, watched)
    outdate = technique.outdate

    def outdated(session: Any) -> None:  # of ScheduleFree, within the optimizer's step
        walks.on = session.trainer.global_step >= 2
        outdate(session)
        walks.on = False

    monkeypatch.setattr(technique, "outdate", outdated)
    trainer(technique, max_steps=6).fit(net, loader("classifier"))
    assert technique._taken >= 2 and walks.count == 0


# -- what is seen of a tree that changes


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.tied = self.head


def insert(tree: Tree) -> None:
    tree.blocks.insert(1, nn.Linear(2, 2))


def append(tree: Tree) -> None:
    tree.blocks.append(nn.Linear(2, 2))


def shorten(tree: Tree) -> None:
    del tree.blocks[0]


def replace_module(tree: Tree) -> None:
    tree.head = nn.Linear(2, 1)


def replace_parameter(tree: Tree) -> None:
    tree.head.weight = nn.Parameter(torch.zeros(1, 2))


def add_parameter(tree: Tree) -> None:
    tree.blocks[1].scale = nn.Parameter(torch.ones(()))


def remove_parameter(tree: Tree) -> None:
    tree.head.bias = None  # type: ignore[assignment]


def parametrize(tree: Tree) -> None:
    nn.utils.parametrizations.weight_norm(tree.head)


def add_buffer(tree: Tree) -> None:
    tree.register_buffer("count", torch.zeros(()))


def by_dictionary(tree: Tree) -> None:
    tree.head._parameters["weight"] = nn.Parameter(torch.zeros(1, 2))


def rename_parameter(tree: Tree) -> None:
    tree.norm.scale = tree.norm.weight
    del tree.norm.weight


def move_parameter(tree: Tree) -> None:
    tree.blocks[0].bias, tree.blocks[1].other = None, tree.blocks[0].bias  # type: ignore[assignment]


@pytest.mark.parametrize(
    "change",
    [
        *(rename_parameter, move_parameter),
        *(insert, append, shorten, replace_module, replace_parameter),
        *(add_parameter, remove_parameter, parametrize, add_buffer, by_dictionary),
    ],
)
def test_every_change_of_the_tree_is_seen(change: Callable[[Tree], None]) -> None:
    tree = Tree()
    tensors = Tensors(SimpleNamespace(module=tree, trainer=trainer()))  # type: ignore[arg-type]
    tensors.look()
    change(tree)
    tensors.look()
    assert [(n, id(p)) for n, p in tensors.parameters.items()] == [(n, id(p)) for n, p in tree.named_parameters()]
    assert [(n, id(b)) for n, b in tensors.buffers()] == [(n, id(b)) for n, b in tree.named_buffers()]
    assert tensors.modes().keys() == dict(tree.named_modules()).keys()


def test_a_buffer_that_is_another_tensor_in_each_step_costs_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, tree = Walks(monkeypatch), Tree()
    tensors = Tensors(SimpleNamespace(module=tree, trainer=trainer()))  # type: ignore[arg-type]
    tensors.look()
    walks.root, walks.on = tree, True
    tree.norm.running_mean = torch.full((2,), 7.0)
    tensors.look()
    assert walks.count == 0 and torch.equal(dict(tensors.buffers())["norm.running_mean"], torch.full((2,), 7.0))


@pytest.mark.parametrize("name", ["ExponentialMovingAverage", "StochasticWeightAveraging", "Lookahead"])
def test_a_layer_that_is_added_in_mid_run_is_averaged(name: str) -> None:
    class Grows(TinyClassifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 6 and not hasattr(self, "extra"):
                self.extra = nn.Parameter(torch.zeros(2))
                self.trainer.optimizers[0].add_param_group({"params": [self.extra]})

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.extra.sum() if hasattr(self, "extra") else 0.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss + (self.extra - 3).square().sum() if hasattr(self, "extra") else loss

    net, technique = Grows(), AVERAGES[name]()
    trainer(technique, max_steps=12).fit(net, loader("classifier"))
    assert "extra" in technique.saved()["held"]


# -- checkpoints


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 1000), nn.Linear(1000, 1000))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(torch.ones(2, 4) * (batch_idx + 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("name", ["ExponentialMovingAverage", "StochasticWeightAveraging"])
def test_a_checkpoint_holds_the_average_once(name: str, tmp_path: Path) -> None:
    """16 bytes per parameter: the average, the trained weights and Adam's two averages."""
    net, path = Wide(), tmp_path / "saved.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(path)

    trainer(AVERAGES[name](), Save(), max_steps=6).fit(net, loader("classifier"))
    count = sum(p.numel() for p in net.parameters())
    assert path.stat().st_size / count < 16.1
    saved = torch.load(path, weights_only=True)
    held = saved["callbacks"][name]["held"]
    assert held.keys() == dict(net.named_parameters()).keys()
    assert all(torch.equal(value, saved["state_dict"][key]) for key, value in held.items())
    assert not torch.equal(saved["callbacks"][name]["raw"]["net.1.weight"], held["net.1.weight"])
    again = Wide()
    trainer(AVERAGES[name](), max_steps=6).fit(again, loader("classifier"), ckpt_path=path)
    assert all(torch.equal(a, b) for a, b in zip(state_of(net).values(), state_of(again).values(), strict=True))


def test_an_average_that_is_blended_or_of_16_bits_is_held_apart() -> None:
    state = {
        "taken": 3,
        "raw": {"a": torch.ones(2)},
        "held": {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)},
    }
    weights = {"a": torch.ones(2), "b": torch.full((2,), 1.5), "c": torch.ones(2, dtype=torch.bfloat16)}
    found = share(state, weights)
    assert found["held"]["a"] is weights["a"] and found["raw"]["a"] is state["raw"]["a"] and found["taken"] == 3
    assert all(found["held"][name] is state["held"][name] for name in "bc")


def test_the_pieces_of_several_ranks_are_parts_of_the_checkpoints_weights() -> None:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(2, 4), "c": torch.randn(3)}
    parts = [{"a": weights["a"][:3], "b": weights["b"][:, :2]}, {"a": weights["a"][3:], "b": weights["b"][:, 2:]}]
    ranks = [{"held": {**{n: t.clone() for n, t in part.items()}, "c": weights["c"].clone()}} for part in parts]
    ranks[1]["held"]["c"] += 1
    found = share({"ranks": ranks}, weights)["ranks"]
    for one, part in zip(found, parts, strict=True):
        for name, expected in part.items():
            assert torch.equal(one["held"][name], expected)
            assert one["held"][name].untyped_storage().data_ptr() == weights[name].untyped_storage().data_ptr()
    assert found[0]["held"]["c"] is weights["c"] and found[1]["held"]["c"] is ranks[1]["held"]["c"]


def test_a_sum_of_an_earlier_version_continues_as_its_mean(tmp_path: Path) -> None:
    build = lambda: [StochasticWeightAveraging(start=0.5, cycle=1)]  # noqa: E731
    whole, _ = fit("classifier", build, directory=tmp_path)
    path = checkpoints(tmp_path)[8]
    saved = torch.load(path, weights_only=True)
    state = saved["callbacks"]["StochasticWeightAveraging"]
    assert state.pop("means") and set(state["counts"].values()) == {3}
    state["held"] = {name: 3 * mean.double() for name, mean in state["held"].items()}
    torch.save(saved, path)
    resumed, _ = fit("classifier", build, resume=path)
    for name, value in state_of(whole).items():
        torch.testing.assert_close(state_of(resumed)[name], value, rtol=1e-5, atol=1e-6)


def test_weights_of_16_bits_are_converted_a_chunk_at_a_time() -> None:
    weights = [torch.randn(300, 1000).bfloat16() for _ in range(10)]
    average = [torch.zeros(300, 1000) for _ in weights]
    with LiveBytes() as live:
        move_average(average, weights, s=0.5)
    assert live.peak - live.total <= 4 * chunk_size(torch.device("cpu"))
    assert all(torch.equal(a, w.float() * 0.5) for a, w in zip(average, weights, strict=True))


def test_a_parameter_that_moves_to_the_next_module_is_seen() -> None:
    """The order of all names and objects stays the same."""
    tree = nn.ModuleList([nn.Module(), nn.Module()])
    tree[0].w = nn.Parameter(torch.zeros(2))
    tensors = Tensors(SimpleNamespace(module=tree, trainer=trainer()))  # type: ignore[arg-type]
    tensors.look()
    w = tree[0].w
    del tree[0].w
    tree[1].w = w
    tensors.look()
    assert [*tensors.parameters] == ["1.w"]
