"""The step chain: links by stage, what stands around the user's step, and passes that leave no trace."""

import random
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import CatMetric

from lightning_eff import ExponentialMovingAverage
from lightning_eff._core import rng
from lightning_eff._core.steps import Stage, Step, StepChain, silent
from tests.cases import CASES
from tests.models import TinyClassifier, loader, make_batch, trainer


def chain_of(module: Any) -> tuple[StepChain, Step]:
    chain = StepChain(module.training_step)
    return chain, Step(chain, module, (7,), 7, 0)


class Plain:
    """Stands in for a module where only the chain matters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return f"own({batch},{batch_idx})"


def naming(name: str) -> Any:
    return lambda step, batch, proceed: f"{name}<{proceed(f'{batch}{name}')}>"


def test_links_run_by_stage_whatever_their_order() -> None:
    chain, step = chain_of(Plain())
    assert chain.run(step, "b") == "own(b,7)"
    for stage in (Stage.REWEIGHT, Stage.TRANSFORM, Stage.PERTURB, Stage.CHOOSE):
        chain.add(stage, naming(stage.name[0]))
    chain.add(Stage.TRANSFORM, naming("t"))
    assert chain.run(step, "b") == "C<T<t<P<R<own(bCTtPR,7)>>>>>"


def test_around_stands_inside_all_links_in_each_pass() -> None:
    chain, step = chain_of(Plain())

    def choose(step: Step, batch: Any, proceed: Any) -> Any:
        step.around = lambda run, batch: f"around({run(batch + '!')})"
        return proceed(batch)

    chain.add(Stage.PERTURB, lambda step, batch, proceed: proceed(batch) + " then " + proceed(batch))
    chain.add(Stage.CHOOSE, choose)
    assert chain.run(step, "b") == "around(own(b!,7)) then around(own(b!,7))"


class Watched(TinyClassifier):
    """Does in its step all that a user's may: logs, counts, draws, keeps lists, metrics and buffers."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.every = MeanMetric(), CatMetric()
        self.several = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
        self.register_buffer("replaced", torch.zeros(2))
        self.outputs: list[Tensor] = []
        self.by_name: dict[str, int] = {"n": 0}
        self.recent: deque[float] = deque(maxlen=2)
        self.names: set[str] = set()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss})
        self.replaced = self.replaced + 1
        self.mean(loss.detach())
        self.every.update(loss.detach())
        self.several(loss.detach())
        self.outputs.append(loss.detach())
        self.by_name["n"] += 1
        self.recent.append(loss.item())
        self.names.add(str(len(self.names)))
        self.count += 1
        self.made_late = True
        draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
        if self.fails:
            raise RuntimeError("planted")
        return loss


draws: list[Any] = []


def _look(net: Watched) -> dict[str, Any]:
    return {
        "buffers": {name: (id(b), b.clone()) for name, b in net.named_buffers()},
        "metrics": (net.mean.compute(), net.every.compute(), net.several.compute()),
        "counts": (net.mean._update_count, net.every._update_count, net.mean._forward_cache),
        "python": (list(net.outputs), dict(net.by_name), deque(net.recent), set(net.names), net.count),
        "attributes": sorted(net.__dict__),
        "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_same(u, v) for u, v in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("fails", [False, True])
def test_forward_only_leaves_no_trace(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = Watched(), make_batch("classifier", 8)
    logged: list[str] = []
    monkeypatch.setattr(Watched, "log", lambda self, name, *args, **kwargs: logged.append(name))
    net.training_step(batch, 0)
    assert logged == ["loss", "twice"]
    chain, step = chain_of(net)
    if fails:
        net.fails = True
    before = _look(net)
    identities = {name: id(getattr(net, name)) for name in ("outputs", "by_name", "recent", "names", "replaced")}
    draws.clear()
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            step.forward_only(batch, 8)
    else:
        output = step.forward_only(batch, 8)
        assert not output.requires_grad
        assert len(draws) == 1, "the user's step ran"
        assert (chain.cost.forward_passes, chain.cost.forward_samples, chain.cost.backward_passes) == (1, 8, 0)
        assert chain.cost.seconds > 0
    after = _look(net)
    for key in before:
        assert _same(before[key], after[key]), key
    assert {name: id(getattr(net, name)) for name in identities} == identities
    assert logged == ["loss", "twice"]
    assert torch.is_grad_enabled()
    if not fails:  # the training pass draws what the pass before it drew
        net.training_step(batch, 0)
        assert draws[0] == draws[1]
        assert logged == ["loss", "twice"] * 2


def test_metrics_of_a_collection_still_share_their_states() -> None:
    net = Watched()
    net.several.update(torch.tensor(1.0))
    net.several.update(torch.tensor(3.0))
    with silent(net):
        net.several.update(torch.tensor(100.0))
    net.several.update(torch.tensor(5.0))
    assert {name: value.item() for name, value in net.several.compute().items()} == {"a": 3.0, "b": 3.0}


def test_lists_within_containers_are_left_as_they_were() -> None:
    net: Any = TinyClassifier()
    net.outputs = {"train": [1], "val": []}
    net.tables = [[], [2]]
    train = net.outputs["train"]
    with silent(net):
        net.outputs["train"].append(3)
        net.outputs["new"] = [4]
        net.tables[0].append(5)
    assert net.outputs == {"train": [1], "val": []} and net.outputs["train"] is train
    assert net.tables == [[], [2]]


def test_a_backward_pass_through_a_silent_pass() -> None:
    """Buffers are put back without a version bump: a graph that saved them still runs."""

    class Scaled(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.scale.data.add_(1)
            return F.cross_entropy(self(batch[0] * self.scale), batch[1])

    net = Scaled()
    with silent(net):
        loss = net.training_step(make_batch("classifier", 8), 0)
    assert torch.equal(net.scale, torch.ones(8))
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())


def test_forward_only_passes_the_links_that_transform_and_no_others() -> None:
    seen = []

    class Sees(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    net, batch = Sees(), make_batch("classifier", 8)
    chain, step = chain_of(net)
    refused = []
    for stage in (Stage.CHOOSE, Stage.PERTURB, Stage.REWEIGHT):
        chain.add(stage, lambda step, batch, proceed: refused.append(1))
    chain.add(Stage.TRANSFORM, lambda step, batch, proceed: proceed(tuple(t[:5] for t in batch)))
    step.around = lambda run, batch: refused.append(2)
    step.forward_only(batch, 8)
    step.forward_only(batch, 8, transform=False)
    assert step.forward_only(batch, 8, lambda run, batch: ("around", len(batch[0]), run(batch) is not None))[:2] == (
        "around",
        5,
    )
    assert seen == [5, 8, 5]
    assert not refused


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_autocast_cache_is_emptied(order: str) -> None:
    """Weights cast for one pass must not serve the other: they have changed, or carry no graph."""
    net, x = TinyClassifier(batch_norm=False), make_batch("classifier", 8)[0]
    w = net.blocks[0][0].weight
    w.data.copy_(w.data.bfloat16())
    moved = w.data * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if order == "before":
            F.linear(x, w)  # fills the cache
            with silent(net):
                w.data.copy_(moved)
                found = F.linear(x, w)
        else:
            with silent(net):
                F.linear(x, w)
                w.data.copy_(moved)
            found = F.linear(x, w)
    assert torch.equal(found.detach(), (x.bfloat16() @ moved.bfloat16().T))


def test_gradients_after_a_scoring_pass_under_autocast() -> None:
    net, (x, y) = TinyClassifier(batch_norm=False).eval(), make_batch("classifier", 8)
    _, step = chain_of(net)

    def gradients(score: bool) -> list[Tensor]:
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if score:
                step.forward_only((x, y), 8)
            loss = net.training_step((x, y), 0)
        loss.backward()
        return [p.grad.clone() for p in net.parameters()]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(a, b)


class Rows(CSVLogger):
    """Keeps what it is told in a list."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "own" in metrics:
            self.rows.append(("metrics", metrics["own"]))

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(add_text=lambda text: self.rows.append(("text", text)))

    def save(self) -> None:
        """Nothing is kept in a file."""

    def finalize(self, status: str) -> None:
        """Likewise."""

    def log_text(self, text: str) -> None:
        self.rows.append(("own method", text))


def test_loggers_are_silent_too(tmp_path: Path) -> None:
    """What a module writes to its loggers by hand is written in its own pass alone; they are put back after an error too."""

    class ByHand(TinyClassifier):
        pass_number = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.pass_number += 1
            for logger in self.loggers:
                assert isinstance(logger, Rows), "it passes for what it stands in for"
                assert (logger.log_dir, logger.version, logger.name) == (own.log_dir, own.version, own.name)
                logger.log_metrics({"own": float(batch_idx)}, step=batch_idx)
                logger.experiment.add_text(f"experiment {batch_idx}")
                logger.log_text(f"text {batch_idx}")
            assert self.trainer.log_dir == own.log_dir
            if self.fails and self.pass_number == 2:
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

        fails = False

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            before = trainer.loggers
            with silent(module):
                module.training_step(batch, batch_idx)
            module.fails = batch_idx == 1
            with suppress(RuntimeError), silent(module):
                module.training_step(batch, batch_idx), module.training_step(batch, batch_idx)
            assert trainer.loggers is before and trainer.loggers == [own]
            module.fails = False

    own, net = Rows(tmp_path), ByHand()
    trainer(Looks(), logger=own, max_steps=2, log_every_n_steps=100).fit(net, loader("classifier", 16))
    each = [[("metrics", float(i)), ("text", f"experiment {i}"), ("own method", f"text {i}")] for i in range(2)]
    assert own.rows == [*each[0], *each[1]]


@pytest.mark.parametrize("name", ["SharpnessAwareMinimization", "MESA", "ExponentialMovingAverage"])
def test_a_step_writes_one_row_whatever_passes_are_beside_it(name: str, tmp_path: Path) -> None:
    class ByHand(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.logger is not None
            self.logger.log_metrics({"own": float(batch_idx)})
            return super().training_step(batch, batch_idx)

    build = {"ExponentialMovingAverage": lambda: ExponentialMovingAverage(2, batch_norm="recompute")}
    own, technique = Rows(tmp_path), build.get(name, CASES[name].active)()
    t = trainer(technique, logger=own, max_steps=4, log_every_n_steps=100, limit_val_batches=1)
    t.fit(ByHand(), loader("classifier", 16), loader("classifier", 8))
    assert techniques_cost(technique) > 0
    assert [value for _, value in own.rows] == [0.0, 1.0, 2.0, 3.0]


def techniques_cost(technique: Any) -> int:
    """The extra passes of the run that it was in."""
    return technique._past.chain.cost.forward_passes


def test_silent_under_a_trainer() -> None:
    """Logs of extra passes must not reach the trainer, whose epoch means would count them."""

    class Twice(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("rows", float(len(batch[0])), on_step=False, on_epoch=True)
            return loss

    net = Twice()
    own = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        with rng.fork(), silent(net):
            own(tuple(t[:2] for t in batch), batch_idx)
        return own(batch, batch_idx)

    net.training_step = training_step
    t = trainer(max_epochs=1)
    t.fit(net, loader("classifier", 16))
    assert t.callback_metrics["rows"] == 4.0
