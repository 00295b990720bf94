"""BatchNorm statistics at averaged weights: those of torch's ``update_bn``, found without a trace in the run."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_eff._core._run.loader_copies import apart
from lightning_eff.optim.averaging.latest_weight_averaging import LatestWeightAveraging
from tests.core.nop import Nop
from tests.models import TinyClassifier, loader, make_batch, trainer
from tests.optim.watch import State, Watch, differing, reference, state_of


class ManyNorms(TinyClassifier):
    """BatchNorm before and after dropout, one that is frozen, and a log."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Dropout(dropout), nn.Tanh())
        self.frozen: Any = nn.BatchNorm1d(8)
        self.frozen.running_mean += 0.3
        self.unused = nn.BatchNorm1d(8)
        self.unused.running_mean += 0.4  # pyright: ignore[reportOperatorIssue]
        self._seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.frozen(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self._seen.append((torch.is_grad_enabled(), self.trainer.training))
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        assert self.trainer.validating
        super().validation_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.frozen.eval()


class Fixed(nn.Module):
    """A BatchNorm layer in evaluation mode, which ``update_bn`` does not take for one."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = [norm]

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm[0]
        return F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, training=False, eps=n.eps)


def updated(net: pl.LightningModule, data: Any) -> State:
    """The state of a copy of ``net`` after torch's own ``update_bn``; a frozen layer keeps its own."""
    other = copy.deepcopy(net)
    if isinstance(other, ManyNorms):
        other.frozen = Fixed(other.frozen)
    update_bn(data, other)
    found = {name: value for name, value in state_of(other).items() if not name.startswith("unused")}
    return {**state_of(net), **found}


def test_statistics_are_those_of_update_bn() -> None:
    data, net = loader("classifier", shuffle=False), ManyNorms()
    watch, lawa = Watch(), LatestWeightAveraging(window=3, interval=2, bn_batches=None)
    t = trainer(lawa, watch, max_steps=12, limit_val_batches=1, val_check_interval=4)
    t.fit(net, data, loader("classifier", shuffle=False))
    net_state = state_of(net)
    assert differing(net_state, reference(watch.raw, [8, 10, 12])) == []
    assert differing(net_state, updated(net, data)) == []
    for name in ("norm.running_mean", "norm.running_var", "blocks.1.running_var"):
        assert not torch.equal(net_state[name], watch.raw[12][name])
        blind = torch.stack([watch.raw[s][name] for s in (8, 10, 12)]).mean(0)
        assert not torch.allclose(net_state[name], blind, rtol=1e-3)
    assert net.norm.momentum == 0.1
    assert net.get_submodule("blocks.1").momentum == 0.3
    kept = {k: v for k, v in watch.raw[12].items() if k.startswith(("frozen.running", "unused.running"))}
    assert len(kept) == 4
    assert differing(net_state, kept) == []
    assert set(net._seen) == {(True, True), (False, True)}
    for step, (state, _) in watch.validated.items():
        plain = ManyNorms()
        plain.load_state_dict(state)
        assert differing(state, updated(plain, data)) == [], step
    assert len(watch.validated) == 2


def test_dropout_is_off_while_statistics_are_recomputed() -> None:
    data, net = loader("classifier", shuffle=False), ManyNorms(dropout=0.5)
    trainer(LatestWeightAveraging(window=3, interval=2, bn_batches=None), max_steps=12).fit(net, data)
    net.blocks[2] = nn.Dropout(0.0)
    assert differing(state_of(net), updated(net, data)) == []


def test_as_many_batches_as_asked_for_and_once_for_each_mean(tmp_path: Path) -> None:
    class Costs(pl.Callback):
        cost: Any

        def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.cost = lawa.session.chain.cost.state_dict()

    data, net, costs = loader("classifier", shuffle=False), TinyClassifier(), Costs()
    lawa = LatestWeightAveraging(window=3, interval=4, bn_batches=2)
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    t = trainer(lawa, costs, save, max_steps=12, limit_val_batches=1, val_check_interval=1, enable_checkpointing=True)
    t.fit(net, data, data)
    assert differing(state_of(net), updated(net, list(data)[:2])) == []
    assert costs.cost["forward_passes"] == 3 * 2  # three means; twelve checkpoints and validations
    assert costs.cost["forward_samples"] == 3 * 2 * 4
    assert costs.cost["backward_passes"] == 0
    assert 0.0 < costs.cost["seconds"] < 10.0


def test_nothing_is_run_without_batch_norm() -> None:
    class Counts(TinyClassifier):
        _steps = 0  # a public attribute would be put back after a silent pass

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self._steps += 1
            return super().training_step(batch, batch_idx)

    net = Counts(batch_norm=False)
    trainer(LatestWeightAveraging(interval=2), max_steps=12).fit(net, loader("classifier"))
    assert net._steps == 12


class Shuffled(torch.utils.data.Sampler[int]):
    """Shuffles its own list in place: it holds state of every kind."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.order, self.generator, self.epoch, self.times = list(range(size)), generator, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        drawn = torch.randperm(len(self.order), generator=self.generator).tolist()
        self.order = [self.order[i] for i in drawn]
        for i in range(self.epoch + self.times):
            self.order.append(self.order.pop(i % 3))
        return iter(self.order)


class Streams(IterableDataset[Any]):
    """An iterable data set that goes on where it was."""

    def __init__(self) -> None:
        self.left = iter(range(0))

    def __iter__(self) -> Iterator[Any]:
        self.x, self.y = make_batch("classifier", 20)
        self.i = 0
        return self

    def __next__(self) -> Any:
        self.i += 1
        if self.i > 20:
            raise StopIteration
        return self.x[self.i - 1], self.y[self.i - 1]

    def __deepcopy__(self, memo: Any) -> "Streams":
        return copy.copy(self)


class Batches(Sequence[Any]):
    """Batches that are there already."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError
        return make_batch("classifier", seed=index)


@pytest.mark.parametrize("kind", ["random", "generator", "sampler", "workers", "stream", "sequence", "dict"])
def test_the_running_epoch_is_not_disturbed(kind: str) -> None:
    def data() -> Any:
        samples = loader("classifier").dataset
        generator = torch.Generator().manual_seed(3)
        if kind == "random":
            return DataLoader(samples, 4, shuffle=True)
        if kind == "generator":
            return DataLoader(samples, 4, shuffle=True, generator=generator)
        if kind == "sampler":
            return DataLoader(samples, 4, sampler=Shuffled(20, generator))
        if kind == "workers":
            return DataLoader(samples, 4, shuffle=True, num_workers=1, persistent_workers=True)
        if kind == "stream":
            return DataLoader(Streams(), 4)
        if kind == "sequence":
            return Batches()
        return {"a": DataLoader(samples, 4, shuffle=True), "b": DataLoader(samples, 2, shuffle=True)}

    class Net(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if isinstance(batch, dict):
                x, y = (torch.cat([batch["a"][i], batch["b"][i]]) for i in (0, 1))
            else:
                x, y = batch
            return F.cross_entropy(self(x), y)

    def run(*techniques: Any) -> Watch:
        pl.seed_everything(4, verbose=False)
        watch, net = Watch(), Net()
        steps = 7 if kind == "workers" else 12
        t = trainer(*techniques, watch, max_steps=steps, limit_val_batches=1, val_check_interval=2)
        t.fit(net, data(), loader("classifier", shuffle=False))
        return watch

    watch, plain = run(LatestWeightAveraging(window=3, interval=2, bn_batches=3)), run(Nop())
    assert [step for step in plain.raw if differing(watch.raw[step], plain.raw[step])] == []
    assert len(plain.raw) == (7 if kind == "workers" else 12)
    states = [state["norm.running_var"] for state, _ in watch.validated.values()]
    assert all(state.isfinite().all() for state in states)


def test_samplers_are_told_an_epoch_of_their_own() -> None:
    samples = loader("classifier").dataset
    sampler: DistributedSampler[Any] = DistributedSampler(samples, 2, 1, seed=5)
    sampler.set_epoch(7)
    combined = CombinedLoader(DataLoader(samples, 4, sampler=sampler), "max_size_cycle")
    expected: DistributedSampler[Any] = DistributedSampler(samples, 2, 1, seed=5)
    expected.set_epoch(3)
    seen = torch.cat([batch[0] for batch, _, _ in apart(combined, epoch=3)])
    assert torch.equal(seen, torch.stack([samples[i][0] for i in expected]))
    assert sampler.epoch == 7
    assert not torch.equal(seen, torch.stack([samples[i][0] for i in sampler]))


def test_loader_without_length_needs_a_number_of_batches() -> None:
    with pytest.raises(ValueError, match=r"without a length.*number of batches"):
        trainer(LatestWeightAveraging(interval=2, bn_batches=None), max_steps=4).fit(
            TinyClassifier(), DataLoader(Streams(), 4)
        )


def test_statistics_under_ddp_are_those_of_all_ranks(two_processes: dict[str, Any]) -> None:
    found = two_processes["batch_norm"]
    assert found["alike"]
    assert found["batches"] == 10
    assert found["error"] < 1e-6
    assert found["moved"] > 1e-2  # from the raw run's statistics
