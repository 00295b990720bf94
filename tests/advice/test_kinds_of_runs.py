"""Runs of other kinds are advised like plain ones: streams, objects, manual optimization, samplers with their own state."""

import html
import json
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from lightning_eff.advice import engine
from lightning_eff.advice._running.measuring import Track
from lightning_eff.advice._running.stopwatch import Enough, Stopwatch
from lightning_eff.advice._running.subject import Change, Subject, entry, isolated
from lightning_eff.advice.advising import Advice, advise
from lightning_eff.advice.engine import Findings
from lightning_eff.advice.intervals import EXACT, Numbers, Turn
from lightning_eff.advice.looking import View, look
from lightning_eff.advice.outcomes import Outcome, Stack
from lightning_eff.advice.progress import Watchman
from lightning_eff.advice.reports import table
from lightning_eff.advice.trials import Trial
from lightning_eff.bench.reports.intervals import Interval
from tests.advice.planted import Gan, Well, rows
from tests.advice.tasks import CLOCK, Cheaper, HandWritten, Plain, Rows, planted_clock


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    with planted_clock():
        yield


def trainer(**settings: Any) -> pl.Trainer:
    silent = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": 2, "enable_model_summary": False, **silent, **settings})


@pytest.fixture
def only_half(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Trial("half", Change((entry(Cheaper, factor=0.5),)), EXACT, "it is planted")
    monkeypatch.setattr(engine, "candidates", lambda view, subject: ([half], {}))
    monkeypatch.setattr(engine, "suggestions", lambda found, module: [])


class Costly(Well):
    """A module with the attribute that the planted trial changes."""

    cost = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.spend(self.cost)
        return super().training_step(batch, batch_idx)


def names(advice: Advice) -> set[str]:
    return {one.name for one in advice.problems}


class Stream(IterableDataset[Any]):
    """Samples without an end that is known."""

    def __iter__(self) -> Iterator[Any]:
        for i in range(400):
            yield torch.full((8,), i / 400), i % 3


@pytest.mark.usefixtures("only_half")
@pytest.mark.parametrize("settings", [{"max_steps": 100, "max_epochs": -1}, {"max_epochs": 2}])
def test_a_stream_of_unknown_length(settings: dict[str, Any]) -> None:
    advice = advise(Costly(), DataLoader(Stream(), 8), trainer=trainer(**settings), minutes=0.5, progress=False)
    assert advice.trials[0].speed is not None
    assert advice.found.view.steps == settings.get("max_steps")


class Batch:
    """A batch of a class of the user's."""

    def __init__(self, samples: list[Any]) -> None:
        self.x, self.y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        return self


class OfObjects(Costly):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch.x), batch.y)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.usefixtures("only_half")
def test_batches_of_a_class_of_the_users() -> None:
    loader = DataLoader(rows().dataset, 8, collate_fn=Batch)
    advice = advise(OfObjects(), loader, trainer=trainer(), minutes=0.5, progress=False)
    assert advice.trials[0].speed is not None and advice.found.view.run.batch_size == 8


class ByHand(HandWritten):
    """Attention by hand in a module that optimizes by hand, and toggles its optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            torch.autograd.grad(loss, [p for p in self.parameters() if p.requires_grad], retain_graph=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        halves = [self.embed, self.qkv], [self.head]
        return [torch.optim.SGD([p for m in half for p in m.parameters()], 0.01) for half in halves]


def test_looking_for_attention_by_hand_does_not_disturb_manual_optimization(tmp_path: Any) -> None:
    tokens: Any = torch.randint(20, (64, 12), generator=torch.Generator().manual_seed(0))
    view = look(Subject(ByHand(), DataLoader(tokens, 4), trainer(), folder=str(tmp_path)))
    assert len(view.by_hand) == 1 and "tasks.py:" in view.by_hand[0] and view.step_seconds > 0
    assert look(Subject(Gan(), rows(), trainer(), folder=str(tmp_path))).step_seconds > 0


class Stateful(Sampler[int]):
    """Draws another order in each epoch, from a state of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(64, generator=self.generator).tolist())


def _with_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), generator=generator), generator=generator)


@pytest.mark.parametrize("make", [lambda: DataLoader(Rows(), 4, sampler=Stateful()), _with_generator])
def test_trials_begin_with_the_same_batches_and_the_users_sampler_stays_as_it_was(make: Any, tmp_path: Any) -> None:
    loader = make()
    state = loader.sampler.generator.get_state()
    subject = Subject(Plain(), loader, trainer(), folder=str(tmp_path))
    seen = [look(subject).numbers for _ in range(2)]
    assert seen[0] is not None and seen[1] is not None and seen[0].differences(seen[1]) == (0.0, 0.0)
    assert torch.equal(loader.sampler.generator.get_state(), state)

    class Owns(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return {"a": loader}

    class Of(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"], batch_idx)

    look(Subject(Of(), Owns(), trainer(), folder=str(tmp_path)))
    assert torch.equal(loader.sampler.generator.get_state(), state)


def test_a_loaders_workers_and_data_are_not_shared() -> None:
    loader = DataLoader(Rows(), 4, num_workers=1, persistent_workers=True)
    fresh = isolated([loader, "text"])[0]
    assert isolated("text") == "text" and fresh.dataset is loader.dataset
    next(iter(fresh))
    assert fresh._iterator is not None and loader._iterator is None
    assert fresh.batch_sampler.sampler is fresh.sampler is not loader.sampler


@pytest.mark.usefixtures("only_half")
def test_no_thread_stays() -> None:
    from tqdm import tqdm

    before = tqdm.monitor, set(threading.enumerate())
    advise(Costly(), rows(), trainer=trainer(), minutes=0.5, progress=False)
    assert (tqdm.monitor, set(threading.enumerate())) == before


@pytest.mark.usefixtures("only_half")
def test_a_loss_that_is_lost_after_the_first_batches_is_a_problem() -> None:
    class Late(Costly):
        after = 20

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (float("nan") if self.global_step >= self.after else 1.0)

    advice = advise(Late(), rows(), trainer=trainer(max_epochs=20), minutes=0.5, progress=False)
    (problem,) = [one for one in advice.problems if one.name == "loss-not-finite"]
    assert "not finite any more at training batch 2" in problem.what


@pytest.mark.usefixtures("only_half")
def test_a_search_for_unused_parameters_of_the_users_strategy_is_reported() -> None:
    strategy = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
    mine = trainer(strategy=strategy, devices=1)
    assert "find-unused-parameters" in names(advise(Costly(), rows(), trainer=mine, minutes=0.5, progress=False))
    mine = trainer(strategy=DDPStrategy(process_group_backend="gloo"), devices=1)
    assert "find-unused-parameters" not in names(advise(Costly(), rows(), trainer=mine, minutes=0.5, progress=False))


@pytest.mark.usefixtures("only_half")
def test_a_data_module_without_validation_data_is_advised_and_its_problems_are_looked_for() -> None:
    class NoData(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return rows()

        def val_dataloader(self) -> Any:
            return None

    class NoDecay(Costly):
        def configure_optimizers(self) -> Any:
            return self.optimizer()

    advice = advise(NoDecay(), NoData(), trainer=trainer(), minutes=0.5, progress=False)
    assert "learning-rate-never-decays" in names(advice)
    assert advice.found.failures["validation"].startswith("TypeError: ")


class Failing(Costly):
    """Each part of an advice fails on it, but its training does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("needs gradients.")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()

        class Fails(torch.optim.lr_scheduler.LambdaLR):
            def step(self, *args: Any) -> None:
                if self.last_epoch >= 0:
                    raise RuntimeError("the schedule is over")
                super().step(*args)

        scheduler = Fails(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.usefixtures("only_half")
def test_each_report_names_the_parts_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("planted <failure>")

    monkeypatch.setattr(engine, "suggestions", fails)
    monkeypatch.setattr(engine, "validated", fails)
    monkeypatch.setattr(
        engine.Engine, "_measure", lambda self, view, arms, *rest, **more: [Track(error="no memory") for _ in range(2)]
    )
    advice = advise(Failing(), rows(), trainer=trainer(), minutes=0.5, progress=False, out=tmp_path)
    expected = {
        "attention written by hand": "RuntimeError: needs gradients. A step without gradients failed, so",
        "the scheduler Fails": "RuntimeError: the schedule is over. The learning rate over the whole run is not known.",
        "validation": "ValueError: planted <failure>. Problems that show only in validation were not looked for.",
        "problems": "ValueError: planted <failure>. Problems of the run were not looked for.",
        "suggestions": "ValueError: planted <failure>. Techniques that change training were not looked at.",
        "the baseline beside half": "no memory. These trials were not measured.",
    }
    record = json.loads((tmp_path / "advice.json").read_text())
    page = " ".join((tmp_path / "advice.html").read_text().split())
    text = " ".join(str(advice).split())
    assert record["failures"].keys() == expected.keys()
    for part, why in expected.items():
        assert record["failures"][part].startswith(why)
        assert f"{part}: {why}" in text and html.escape(f"{part}: {why}") in page
    for report in (text, html.unescape(page)):
        assert "None found." not in report and "Nothing." not in report
        assert report.count("Not known, because this part failed: ValueError: planted <failure>") == 2
        assert table.OPEN in report and "half could not be measured, because the run failed beside them." in report
    assert record["not_tried"]["half"] == "the baseline failed beside it"


def test_problems_of_a_run_whose_validation_failed_are_those_of_training() -> None:
    found = Findings("M", View(), failures={"validation": "planted"})
    assert "None found. Validation failed, so this is of training alone." in table.text(found)
    assert "Nothing. Validation" not in table.text(found)


def test_a_stack_that_was_not_measured_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack([_outcome(1.4, 1.6).trial])
    found = Findings("M", View(), stack=stack)
    watch: Any = Watchman(30.0, enabled=False)
    subject: Any = None
    monkeypatch.setattr(engine.Engine, "_measure", lambda *args, **more: [Track(error="no memory"), Track()])
    engine.Engine(subject, watch)._measure_again(found)
    watch.close()
    assert found.failures == {"one together": "no memory. Their speed-up was not measured on new turns."}


def test_trials_that_came_close_get_the_time_that_no_stack_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    close, far = _outcome(0.98, 1.12, "close"), _outcome(0.8, 0.9, "far")
    loader = Outcome(Trial("loader", Change(), EXACT, "it is planted", group="loader"), Interval(1.01, 0.9, 1.2, 6))
    close.start_seconds = 3.0  # so that it pays only after some batches
    found = Findings("M", View(step_seconds=1e-3), outcomes=[close, far, loader])
    watch: Any = Watchman(60.0, enabled=False)
    subject: Any = SimpleNamespace(settings={})
    measured: list[Any] = []

    def measure(self: Any, view: Any, arms: Any, *rest: Any, **more: Any) -> list[Track]:
        measured.append([arm.name for arm in arms])
        return [Track(turns=_turns(1.1, 1.1, 1.1)), Track(turns=_turns(1.0, 1.0))]

    monkeypatch.setattr(engine.Engine, "_measure", measure)
    asked = engine.Engine(subject, watch)
    asked._turns["close"] = (_turns(1.05, 1.15, 9.9), _turns(1.0, 1.0))
    asked._try_again(found)
    asked._try_again(found)  # it is faster now, so nothing is tried again
    watch.close()
    assert measured == [["close"]]
    assert close.speed is not None and close.speed.n == 4 and close.faster
    assert close.speed.estimate == pytest.approx((1.05 * 1.15 * 1.1 * 1.1) ** 0.25)
    assert close.pays_after == math.ceil(3.0 / (1.1 - 1.0))


# -- what the headline may say


def _turns(*seconds: float) -> list[Turn]:
    return [Turn(one, 4, 0, 1) for one in seconds]


def _outcome(low: float, high: float, name: str = "one") -> Outcome:
    planted = Trial(name, Change(), EXACT, "it is planted")
    return Outcome(planted, Interval((low * high) ** 0.5, low, high, 6))


def test_nothing_to_gain_is_said_only_if_a_gain_is_excluded() -> None:
    found = Findings("M", View(), outcomes=[_outcome(0.98, 1.02)])
    assert table.headline(found) == table.NOTHING
    found.outcomes.append(_outcome(0.7, 1.6, "wide"))
    found.skipped = ["late"]
    told = table.headline(found)
    assert told.startswith(table.OPEN) and "wide are too wide" in told and "no time for late" in told
    assert [table.row(found, one)["verdict"] for one in found.outcomes] == ["no measurable difference", "undecided"]


def test_what_two_plain_runs_differ_in_is_not_blamed_on_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)

    class Own(Plain):
        """Draws from a state that no seed reaches."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + torch.rand((), generator=draws))

    half = Trial("half", Change((entry(Cheaper, factor=0.5),)), EXACT, "it is planted")
    monkeypatch.setattr(engine, "candidates", lambda view, subject: ([half], {}))
    monkeypatch.setattr(engine, "suggestions", lambda found, module: [])
    advice = advise(lambda: Own(), DataLoader(Rows(), 4), trainer=trainer(), minutes=0.5, progress=False)
    assert advice.trials[0].noisy
    text = " ".join(str(advice).split())
    assert "not known: plain runs differ, too" in text and "Two plain runs with the same seed differ by" in text
    assert "up to rounding" not in text and "bit-equal" not in text


def test_bit_equal_numbers_are_called_the_same() -> None:
    stack = Stack([_outcome(1.4, 1.6).trial], Interval(1.5, 1.4, 1.6, 6))
    found = Findings("M", View(), stack=stack)
    assert table.headline(found).endswith("with the same numbers.")
    stack.gradients = 1e-6
    assert table.headline(found).endswith("with the same numbers up to rounding.")
    assert Numbers(1.0, {}).differences(Numbers(1.0, {})) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("workers", "factor", "window", "asked", "counted"), [(0, 2, 1, 3, 3), (2, 1, 1, 3, 4), (2, 2, 3, 3, 6)]
)
def test_turns_count_whole_rounds_of_workers(workers: int, factor: int, window: int, asked: int, counted: int) -> None:
    """Two workers that began together deliver together, so of three batches only one or two would be waited for."""
    watch = Stopwatch(asked, lambda: False, lambda: None, skip=1)
    prefetch: dict[str, Any] = {"prefetch_factor": factor} if workers else {}
    loader = DataLoader(Rows(), 2, num_workers=workers, **prefetch)
    with pytest.raises(Enough):
        trainer(callbacks=[watch], accumulate_grad_batches=window, limit_val_batches=0).fit(Plain(), loader)
    (turn,) = watch.turns
    assert turn.batches == counted and turn.samples == 2 * counted and turn.seconds == counted
    assert turn.workers == (workers > 0)
