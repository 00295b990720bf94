"""Modules with unusual sides: rates that follow the metric, manual optimization, loaders of their own, metrics by name."""

from pathlib import Path

import pytest

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.pace import mode_of
from lightning_eff.tune.config import Choices
from lightning_eff.tune.space import MANUAL, gather
from lightning_eff.tune.timing import Timetable
from lightning_eff.tune.trials import Trials, dishonest
from lightning_eff.tune.tuner import Tuner
from tests.tune.tasks import Here, config

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.tune.tuner.Places", Here)


def test_a_rate_that_follows_the_metric_is_decayed_in_its_place(tmp_path: Path) -> None:
    text = "model: {class_path: tests.tune.tasks.Plateau}"
    tuner = Tuner(
        config(tmp_path, text), target="val_loss", budget=3, include=["tests.tune.tasks.Neutral"], out=tmp_path / "out"
    )
    look = tuner.look()
    assert look.found.schedule == "linear" and not look.found.run.decayed_rate
    assert "follows the metric" in look.found.why["decayed_rate"]
    (callback,) = look.recipes.overlay(Choices(), 100)["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning_eff.LearningRateSchedule"
    trials = Trials(look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=3, seed=0, threads=1)  # pyright: ignore[reportArgumentType]
    assert trials._rehearsed(Choices())["status"] == "finished", "whose schedule is the one that stands in its place"


def test_manual_optimization_leaves_what_does_not_come_between(tmp_path: Path) -> None:
    file = tmp_path / "baseline.yaml"
    file.write_text("trainer: {accelerator: cpu, devices: 1}\nmodel: {class_path: tests.tune.tasks.Manual}\n")
    tuner = Tuner(
        file, target="val_loss", budget=3, search=1e6, include=["tests.tune.tasks.Neutral"], out=tmp_path / "out"
    )
    look = tuner.look()
    assert look.found.run.manual_optimization and list(look.space.techniques) == ["tests.tune.tasks.Neutral"]
    whole = gather(look.found.run, (), {})
    assert whole.left_out["SharpnessAwareMinimization"] == MANUAL and "Lookahead" in whole.techniques
    with pytest.raises(
        UsageError, match=r"steps its own optimizers .* does not decay .*Decay the learning rate in the module"
    ):
        tuner.run(progress=False)


def test_a_rate_that_a_module_with_manual_optimization_decays_is_seen_to_decay(tmp_path: Path) -> None:
    file = tmp_path / "baseline.yaml"
    model = "{class_path: tests.tune.tasks.Manual, init_args: {schedule: true}}"
    file.write_text(f"trainer: {{accelerator: cpu, devices: 1}}\nmodel: {model}\n")
    tuner = Tuner(file, target="val_loss", budget=3, include=["tests.tune.tasks.Neutral"], out=tmp_path / "out")
    look = tuner._look(lambda line: None, Timetable(1e6, (1.0,)))
    assert look.found.run.decayed_rate and look.found.steps > 100, look.found.why["decayed_rate"]
    trials = Trials(look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=0.3, seed=0, threads=1)  # pyright: ignore[reportArgumentType]
    assert trials(Choices(), 0.3).value is not None


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        ("val_acc acc1 val/Accuracy val_top5 f1_score val_F1 BinaryAccuracy val_r2 dice_score val_map50 auroc", "max"),
        ("val_loss val_mape mse perplexity error fid neg_log_likelihood val_embed_loss replay_loss", "min"),
    ],
)
def test_whether_more_is_better_is_told_by_a_metric_s_name(names: str, mode: str) -> None:
    assert {name: mode_of(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_a_clock_that_runs_late_for_the_baseline_too_is_the_machine_s(tmp_path: Path) -> None:
    record = {"wall_seconds": 10.0, "warmup_seconds": 0.0, "validation_seconds": 0.0, "kinds": []}
    assert "by another clock" in str(dishonest(record, {}, 10.0, 25.0))
    assert dishonest(record, {}, 10.0, 25.0, usual=2.0) is None
    assert "by another clock" in str(dishonest(record, {}, 10.0, 35.0, usual=2.0))
