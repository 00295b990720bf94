"""What costs a run time for nothing is found where it is planted, and its twin is not accused."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import BinaryAccuracy

from lightning_eff.advice._looking import clock
from tests.advice.planted import Gan, Well, rows, watch

# -- synchronisations


class Reads(Well):
    """Does something with a tensor that hangs on the weights, at the marked line."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read = read

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0])
        if self.trainer.training:
            self.read(logits.detach().mean())  # here
        return F.cross_entropy(logits, batch[1])


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.item(),
    "float": float,
    "int": int,
    "bool": lambda t: 1 if t > 0 else 0,
    "any": lambda t: bool((t != t).any()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to the host": lambda t: t.to("cpu"),
    "numpy": lambda t: t.cpu().numpy(),
    "print": lambda t: print(t),
    "format": lambda t: f"{t:.3f}",
    "repr": lambda t: f"{t[None]}",
}


@pytest.mark.parametrize("name", READS)
def test_a_synchronisation_in_the_users_step(name: str) -> None:
    found = watch(Reads(READS[name]))
    assert set(found) == {"host-synchronisation"}
    what = found["host-synchronisation"].what
    assert "waits for it 1 times" in what and "test_problems_costs.py:" in what


class ReadsInHooks(Well):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs["loss"].item()  # after

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = float(self.head.weight.grad.norm())  # before  # pyright: ignore[reportOptionalMemberAccess]


class ReadsElsewhere(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()  # in a callback


def test_a_synchronisation_in_a_hook_of_the_users() -> None:
    module, callback = ReadsInHooks(), ReadsElsewhere()
    what = watch(module, callback)["host-synchronisation"].what
    assert "waits for it 3 times" in what
    assert all(f"# {words}" in what for words in ("after", "before", "in a callback"))
    assert "on_train_batch_end" not in {**vars(module), **vars(callback)}


def test_the_line_is_the_one_that_reads() -> None:
    class Here(Well):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            for _ in range(3):
                loss.item()
            return loss

    lines, first = inspect.getsourcelines(Here)
    at = first + next(i for i, line in enumerate(lines) if ".item()" in line)
    assert f"test_problems_costs.py:{at} (loss.item()) 3 times" in watch(Here())["host-synchronisation"].what


HARMLESS: dict[str, Callable[[Tensor], Any]] = {
    "a draw on the host": lambda t: torch.rand(1).item() < 0.5,
    "a draw that decides": lambda t: 1 if torch.rand(()) < 0.5 else 0,
    "a number": lambda t: float(t.shape.numel()),
    "no copy": lambda t: t.to(torch.float32).to(t.device),
    "a list": lambda t: torch.tensor([1, 2]).tolist(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_lies_on_the_host_anyway_is_no_synchronisation(name: str) -> None:
    assert watch(Reads(HARMLESS[name])) == {}


def test_a_copy_counts_once_with_what_is_read_from_it() -> None:
    def read(t: Tensor) -> None:
        here = t.cpu()
        here.item()
        (here + 1).tolist()

    what = watch(Reads(read))["host-synchronisation"].what
    assert "waits for it 1 times" in what and "here = t.cpu()" in what


class Packed(Well):
    """A recurrent network on texts of several lengths, which torch reads on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(1, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) % 8 + 1
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.encoder(packed)[1][-1])


def test_lengths_that_lie_on_the_host_are_no_synchronisation() -> None:
    assert watch(Packed()) == {}


class Seldom(Well):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_step % 4 == 0:
            print(loss.item())
        self.log("loss", loss, on_step=True)
        return loss


def test_a_value_that_is_read_now_and_then_is_no_problem() -> None:
    assert watch(Seldom()) == {}


class Measured(Well):
    def __init__(self, *, validate_args: bool) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy(validate_args=validate_args)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("accuracy", self.accuracy(logits[:, 0], batch[1] % 2), on_step=True)
        return F.cross_entropy(logits, batch[1])


def test_a_library_that_checks_its_arguments_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.advice._looking.costs.METRICS", 1.0)
    found = watch(Measured(validate_args=True))["host-synchronisation"]
    assert "self.accuracy(logits[:, 0], batch[1] % 2)" in found.what and "validate_args=False" in found.fix
    assert "host-synchronisation" not in watch(Measured(validate_args=False))


class Shows(Well):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


def test_a_progress_bar_and_a_logger_of_every_step(tmp_path: Any) -> None:
    assert set(watch(Shows(), progress_bar_rate=1)) == {"progress-bar-synchronisation"}
    assert set(watch(Shows(), TQDMProgressBar(1), enable_progress_bar=True)) == {"progress-bar-synchronisation"}
    assert watch(Shows(), TQDMProgressBar(20), enable_progress_bar=True) == {}
    assert watch(Shows(), progress_bar_rate=20) == {}
    assert watch(Seldom(), progress_bar_rate=1) == {}
    assert watch(Shows()) == {}
    assert set(watch(Shows(), log_every_n_steps=1, logger=CSVLogger(tmp_path))) == {"logging-every-step"}
    assert watch(Shows(), log_every_n_steps=10, logger=CSVLogger(tmp_path)) == {}
    assert watch(Well(), logger=CSVLogger(tmp_path)) == {}


# -- work that is done twice


class ForMetrics(Well):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.log("accuracy", (self(batch[0]).argmax(-1) == batch[1]).float().mean())
        return self.loss(batch)


class Encodes(Well):
    def loss(self, batch: Any) -> Tensor:
        first = self.head(self.encoder(batch[0]))
        return F.cross_entropy(first + self.head(self.encoder(batch[0])), batch[1])


class DropsForMetrics(ForMetrics):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Dropout(0.1), *self.encoder)


class NormsForMetrics(ForMetrics):
    """The first pass has the gradient, and a BatchNorm and a dropout lie in the way."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = self.encoder
        self.encoder = nn.Sequential(first, nn.Dropout(0.1), nn.BatchNorm1d(32), *others)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        with torch.no_grad():
            self.log("accuracy", (self(batch[0]).argmax(-1) == batch[1]).float().mean())
        return loss


class WithGradient(NormsForMetrics):
    """The metrics' pass has a gradient that nobody asks for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("accuracy", (self(batch[0]).argmax(-1) == batch[1]).float().mean())
        return loss


def test_a_second_pass_for_metrics_that_draws_other_dropout() -> None:
    assert watch(NormsForMetrics())["duplicate-work"].share == pytest.approx(0.25, rel=0.1)
    assert watch(WithGradient())["duplicate-work"].share == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("cls", [ForMetrics, Encodes, DropsForMetrics])
def test_a_forward_pass_that_is_done_twice(cls: type[Well]) -> None:
    problem = watch(cls())["duplicate-work"]
    assert problem.share is not None and problem.share == pytest.approx(0.25 if cls is not Encodes else 0.5, rel=0.1)
    assert ("encoder" in problem.what and "test_problems_costs.py:" in problem.what) or cls is DropsForMetrics


def test_the_lines_that_do_work_twice() -> None:
    what = watch(ForMetrics())["duplicate-work"].what
    lines, first = inspect.getsourcelines(ForMetrics.training_step)
    again = next(i for i, line in enumerate(lines) if "self.loss(batch)" in line)
    once = next(i for i, line in enumerate(lines) if "argmax" in line)
    assert (
        f"test_problems_costs.py:{first + again} and at " in what and f"test_problems_costs.py:{first + once}." in what
    )

    class InALoop(Well):
        def loss(self, batch: Any) -> Tensor:
            return torch.stack([self(batch[0]).square().mean() for _ in range(2)]).sum()

    assert "at tests/advice/test_problems_costs.py:" in watch(InALoop())["duplicate-work"].what


class Siamese(Well):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x) + self(x.flip(0)), y)


class RDrop(Well):
    """Two passes that differ in their dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Dropout(0.1), *self.encoder)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(x), y)


class Repeats(Well):
    """One layer again and again, as ALBERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for _ in range(4):
            x = x + self.again(x).relu()
        return self.head(x)


class AtOnce(Gan):
    """Both losses before the first backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        fake = self.generator(torch.randn(8, 4))
        wins = F.softplus(-self.critic(fake)).mean()
        loses = F.softplus(self.critic(fake.detach())).mean()
        first.zero_grad()
        self.manual_backward(wins)
        second.zero_grad()
        self.manual_backward(loses)
        first.step()
        second.step()


class ByTask(AtOnce):
    """A backward pass for each task, after which the graph is gone."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        first.zero_grad()
        for task in (1.0, -1.0):
            self.manual_backward((self.generator(batch[0][:, :4]) - task).square().mean())
        first.step()


@pytest.mark.parametrize("cls", [Siamese, RDrop, Repeats, Gan, AtOnce, ByTask])
def test_passes_that_differ_are_no_duplicates(cls: type[pl.LightningModule]) -> None:
    assert "duplicate-work" not in watch(cls())


# -- time, by a clock of our own


class Ticks:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clock, "perf_counter", lambda: self.now)
        monkeypatch.setattr(clock, "queued_seconds", lambda: 0.0)

    def pass_by(self, seconds: float, sample: Any = None) -> Any:
        self.now += seconds
        return sample


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(monkeypatch)


class Timed(Well):
    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self.ticks = [ticks]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ticks[0].pass_by(0.03)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ticks[0].pass_by(0.02)


@pytest.mark.parametrize(("seconds", "share"), [(0.01 / 8, 0.25), (0.005 / 8, None)])
def test_a_loader_that_steps_wait_for(ticks: Ticks, seconds: float, share: float | None) -> None:
    slow = rows(size=128, change=lambda sample: ticks.pass_by(seconds, sample))
    found = watch(Timed(ticks), train=slow)
    if share is None:
        assert found == {}
        return
    assert found["waiting-for-data"].share == pytest.approx(share)
    assert (
        "10 ms of 40 ms (25%)" in found["waiting-for-data"].what and "num_workers=0" in found["waiting-for-data"].what
    )


def test_a_validation_that_takes_most_of_the_run(ticks: Ticks) -> None:
    data = {"train": rows(), "val": rows(size=160)}  # 20 batches of 20 ms, after 8 of 30 ms
    problem = watch(Timed(ticks), **data)["slow-validation"]
    assert problem.share == pytest.approx(0.4 / 0.64) and "20 batches" in problem.what
    assert watch(Timed(ticks), validate_every=80, **data) == {}
    assert watch(Timed(ticks), validation_batches=2, **data) == {}
    assert watch(Timed(ticks), check_val_every_n_epoch=10, **data) == {}


def test_metrics_that_cost_much_of_each_step(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(torchmetrics.MeanMetric):
        def update(self, value: Any, weight: Any = 1.0) -> None:
            ticks.pass_by(0.005)
            super().update(value, weight)

    class Costly(Timed):
        def __init__(self, every: int) -> None:
            super().__init__(ticks)
            self.metric, self.every = Slow(), every

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % self.every == 0:
                self.metric(batch[0])
            return super().training_step(batch, batch_idx)

    problem = watch(Costly(1), train=rows(size=128))["costly-metrics"]
    assert problem.share is not None and problem.share > 0.1 and "Slow at " in problem.what
    assert watch(Costly(20), train=rows(size=128)) == {}
