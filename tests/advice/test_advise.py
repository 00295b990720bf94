"""``advise`` as a whole: planted effects are found, nothing of the user's changes, and the recipe trains."""

import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

import lightning_eff
from lightning_eff import cli
from lightning_eff._cli.errors import UsageError
from lightning_eff.advice import engine
from lightning_eff.advice._running.subject import Change, entry
from lightning_eff.advice.advising import Advice, advise
from lightning_eff.advice.intervals import BATCHES, EXACT, PRECISION
from lightning_eff.advice.outcomes import OTHER
from lightning_eff.advice.reports import pictures, table
from lightning_eff.advice.trials import Trial, candidates
from tests.advice.tasks import Breaks, Cheaper, Compiles, HandWritten, Plain, Rows, Table, planted_clock, token_loader

MINUTES = 0.5  # more than a test needs, since intervals of planted costs are narrow at once


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    with planted_clock():
        yield


def trainer(**settings: Any) -> pl.Trainer:
    silent = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return pl.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **silent, **settings)


def trial(name: str, cls: Any, *, kind: str = EXACT, recipe: bool = True, **arguments: Any) -> Trial:
    return Trial(name, Change((entry(cls, **arguments),)), kind, "it is planted", recipe=recipe)


def only(monkeypatch: pytest.MonkeyPatch, *trials: Trial, suggested: tuple[Any, ...] = ()) -> None:
    """Try these alone."""
    monkeypatch.setattr(engine, "candidates", lambda view, subject: (list(trials), {"left": "planted"}))
    monkeypatch.setattr(engine, "suggestions", lambda found, module: list(suggested))


def outcome(advice: Advice, name: str) -> Any:
    return next(one for one in advice.trials if one.trial.name == name)


def test_measured_ratios_are_the_planted_ones_and_the_best_exact_trials_are_stacked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(
        monkeypatch,
        trial("half", Cheaper, factor=0.5),
        trial("less", Cheaper, factor=0.8),
        trial("spoils", Cheaper, factor=0.9, with_other=1.5),
        trial("slower", Cheaper, factor=2.0),
        trial("breaks", Breaks),
        trial("other numbers", Cheaper, factor=0.1, shift=0.5),
        trial("rounds", Cheaper, kind=PRECISION, factor=0.25, shift=1e-3),
        trial("batches", Cheaper, kind=BATCHES, factor=0.1),
        trial("code", Cheaper, factor=0.2, recipe=False),
    )
    advice = advise(Plain(), Table(), trainer=trainer(), minutes=MINUTES, out=tmp_path / "out", progress=False)
    for name, factor in (("half", 0.5), ("less", 0.8), ("slower", 2.0), ("rounds", 0.25), ("code", 0.2)):
        speed = outcome(advice, name).speed
        assert speed.low <= 1 / factor * (1 + 1e-9) and speed.high >= 1 / factor * (1 - 1e-9), name
        assert speed.estimate == pytest.approx(1 / factor), name
    assert [one.name for one in advice.stack.trials] == ["half", "less"]
    assert advice.stack.speed is not None and advice.stack.speed.estimate == pytest.approx(1 / (0.5 * 0.8))
    assert any("spoils was not added" in line for line in advice.stack.tried)
    assert outcome(advice, "half").kind == EXACT and outcome(advice, "half").gradients == 0
    assert outcome(advice, "other numbers").kind == OTHER and outcome(advice, "other numbers").gradients > 0.1
    assert outcome(advice, "slower").slower and not outcome(advice, "slower").faster
    assert [one.name for one in advice.found.lower.trials] == ["half", "less", "rounds"]
    assert outcome(advice, "breaks").error == "planted failure"
    text = str(advice)
    assert "Use half + less: this run is then 2.50 times as fast" in text
    assert "breaks: planted failure" in text
    written = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["trainer"]
    paths = [one["init_args"] for one in written["callbacks+"]]
    assert paths == [{"factor": 0.5}, {"factor": 0.8}]
    lower = yaml.safe_load((tmp_path / "out" / "recipe-lower-precision.yaml").read_text())["trainer"]
    assert len(lower["callbacks+"]) == 3
    html = (tmp_path / "out" / "advice.html").read_text()
    assert "2.50 times as fast" in html and html.count("<img") == 3
    assert advice.stack.memory is not None and advice.stack.memory[0] == advice.stack.memory[1], "the same tensors"
    now, recipe = (part for part in pictures.memory(advice.found).alternative.partition(": ")[2].split("; ")[:2])
    assert now.partition("now: ")[2] == recipe.partition("recipe: ")[2] != ""
    record = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert record["stack"]["trials"] == ["half", "less"] and record["not_tried"]["left"] == "planted"
    assert "Cheaper(factor=0.5), Cheaper(factor=0.8)" in advice.python


def test_a_start_that_the_run_is_too_short_for_is_told_and_not_in_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has 32 batches, and each saves half a planted second."""
    only(
        monkeypatch,
        trial("long", Compiles, factor=0.5, start=1000.25),
        trial("short", Compiles, factor=0.5, start=10.25),
    )
    advice = advise(Plain(), Table(), trainer=trainer(), minutes=MINUTES, progress=False)
    assert outcome(advice, "long").pays_after == 2000 and outcome(advice, "short").pays_after == 20
    assert outcome(advice, "long").faster and [one.name for one in advice.stack.trials] == ["short"]
    assert "long: 1000 s at the start, paid for after 2,000 batches" in str(advice)
    assert "it pays for its start after 2,000 batches, and this run has 32" in " ".join(str(advice).split())
    assert "faster, but this run is too short for its start" in str(advice)


def test_nothing_of_the_users_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    only(monkeypatch, trial("half", Cheaper, factor=0.5), trial("fused", lightning_eff.FusedNorms))
    module, data = Plain(), Table()
    module.eval()
    mine, callback = trainer(), Cheaper(1.0)
    mine.callbacks.append(callback)  # pyright: ignore[reportAttributeAccessIssue]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes, held = dict(vars(module)), dict(vars(data))
    environment = dict(os.environ)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # pyright: ignore[reportIndexIssue]
    advise(module, data, trainer=mine, minutes=MINUTES, progress=False)
    assert random.getstate() == state[0] and np.random.get_state()[1].tolist() == state[1]  # pyright: ignore[reportIndexIssue]
    assert torch.equal(torch.get_rng_state(), state[2])
    assert dict(os.environ) == environment and Path.cwd() == tmp_path and not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert dict(vars(module)) == attributes and dict(vars(data)) == held
    assert not any(m.training for m in module.modules())
    assert mine.global_step == 0 and mine.callbacks[-1] is callback  # pyright: ignore[reportAttributeAccessIssue]


def test_a_slow_loader_is_found_and_workers_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_loaders(view: Any, subject: Any) -> Any:
        every, left = candidates(view, subject)
        return [one for one in every if one.group == "loader"], left

    monkeypatch.setattr(engine, "candidates", of_loaders)
    loader = DataLoader(Rows(seconds=1.0, real=0.001), 4, shuffle=True)
    advice = advise(Plain(), loader, trainer=trainer(), minutes=MINUTES, progress=False)
    assert advice.found.view.waiting > 0.3
    workers = next(one for one in advice.trials if one.trial.name.startswith("num_workers="))
    assert workers.faster and workers.kind == EXACT and workers.gradients == 0
    assert workers.speed is not None and workers.speed.estimate == pytest.approx(
        5.0, rel=0.2
    )  # 4 planted seconds of 5 are gone
    assert advice.stack.trials[0].group == "loader"


def test_attention_by_hand_is_found_with_its_place_and_replaced() -> None:
    advice = advise(HandWritten(), token_loader(), trainer=trainer(), minutes=MINUTES, progress=False)
    fused = outcome(advice, "FusedAttention")
    assert fused.speed is not None and fused.speed.estimate == pytest.approx(4.0)
    assert fused.kind == EXACT and 0 < fused.gradients < 1e-5
    assert "tasks.py:" in fused.trial.reason
    assert advice.stack.trials[0].name == "FusedAttention"
    assert any("F.scaled_dot_product_attention" in line for line in table.code_of(advice.found))


def test_where_nothing_gains_it_says_so_and_the_recipe_still_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": {"class_path": "tests.advice.tasks.Plain"},
                "data": {"class_path": "tests.advice.tasks.Table", "init_args": {"size": 32}},
                "trainer": {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False},
            }
        )
    )
    monkeypatch.chdir(tmp_path)
    cli.main(["advise", "--config", str(config), "--minutes", str(MINUTES), "--quiet"])
    told = capsys.readouterr().out
    assert told.startswith(table.NOTHING)
    assert "no measurable difference" in told and "run it:" not in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lightning_logs", "mine.yaml"]
    written = tmp_path / "lightning_logs" / "advise"
    assert sorted(p.name for p in written.iterdir()) == ["advice.html", "advice.json", "recipe.yaml"]
    cli.main(["fit", "--config", str(config), "--config", str(written / "recipe.yaml")])


def test_a_recipe_with_changes_trains_with_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.yaml"
    own = {"class_path": "tests.advice.tasks.Cheaper", "init_args": {"factor": 1.0}}
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "callbacks": [own],
    }
    model, data = ({"class_path": f"tests.advice.tasks.{name}"} for name in ("Plain", "Table"))
    config.write_text(yaml.safe_dump({"model": model, "data": data, "trainer": settings}))
    only(monkeypatch, trial("less", Cheaper, factor=0.5))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "advice"
    cli.main(["advise", "-c", str(config), "--minutes", str(MINUTES), "--out", str(out), "--quiet"])
    told = capsys.readouterr().out
    assert f"run it: lightning-eff fit --config {config} --config {out / 'recipe.yaml'}" in told
    kept: list[Any] = []
    start = Cheaper.on_fit_start
    monkeypatch.setattr(Cheaper, "on_fit_start", lambda self, *args: (kept.append(self.factor), start(self, *args))[1])
    cli.main(["fit", "--config", str(config), "--config", str(out / "recipe.yaml")])
    assert kept == [1.0, 0.5]  # the run's own callback, and the recipe's


def test_suggestions_that_are_refused_in_two_steps_are_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    def suggestion(name: str, cls: Any, **arguments: Any) -> Any:
        return engine.Suggestion(name, "code", entry(cls, **arguments), "reason", "gain", None)

    good, bad = suggestion("Good", Cheaper, factor=1.0), suggestion("Bad", Breaks)
    only(monkeypatch, suggested=(bad, good))
    advice = advise(Plain(), Table(), trainer=trainer(), minutes=MINUTES, progress=False)
    assert [one.name for one in advice.suggestions] == ["Good"]
    assert advice.found.left["Bad"] == "planted failure"
    assert "Bad" not in table.text(advice.found).partition(table.THIRD)[0]


def test_a_module_of_pytorch_lightning_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        cost = 1.0
        __init__ = Plain.__init__  # pyright: ignore[reportAssignmentType]
        training_step, configure_optimizers = Plain.training_step, Plain.configure_optimizers

    def build() -> Any:
        module = Other.__new__(Other)
        pytorch_lightning.LightningModule.__init__(module)
        module.net = Plain().net
        return module

    only(monkeypatch, trial("same", lightning_eff.EfficiencyMonitor))
    settings = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    mine = pytorch_lightning.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **settings)
    advice = advise(build, DataLoader(Rows(), 4), trainer=mine, minutes=MINUTES, progress=False)
    assert outcome(advice, "same").speed is not None
    assert outcome(advice, "same").speed.estimate == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": "x"}, r"advise\(module=str\): expected a LightningModule, or a function that returns a new one"),
        ({"module": lambda: 3}, r"advise\(module=\.\.\.\): the function returned a int"),
        ({"minutes": 0}, r"advise\(minutes=0\): expected a number above 0. Use minutes=3\."),
        ({"trainer": 1}, r"advise\(trainer=int\): expected a Lightning Trainer"),
        ({"data": 5}, r"advise\(data=int\): expected a LightningDataModule or loaders"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        advise(**{"module": Plain(), "data": Table(), "progress": False, **arguments})


def test_a_module_that_cannot_be_copied_needs_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Plain()
    module.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        UsageError, match=r"it cannot be copied .* Pass a function .*: advise\(lambda: Plain\(\.\.\.\), \.\.\.\)"
    ):
        advise(module, Table(), progress=False)


def test_an_error_of_the_run_itself_is_raised() -> None:
    with pytest.raises(RuntimeError, match="planted failure"):
        advise(Plain(), Table(), trainer=trainer(callbacks=[Breaks()]), progress=False)


def test_the_command_needs_a_config_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "advise needs a config"), (["--config", "none.yaml"], "no such file")):
        with pytest.raises(SystemExit) as error:
            cli.main(["advise", *arguments])
        assert error.value.code == 2
        assert message in capsys.readouterr().err
