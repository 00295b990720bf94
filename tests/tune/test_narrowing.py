"""A search on a narrow model: what it carries over, how many steps it makes, and what it writes for the wide one."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from lightning_eff import cli
from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.running.workers import InProcess
from lightning_eff.tune.command import main
from lightning_eff.tune.config import Choices
from lightning_eff.tune.narrowing import NarrowTuner, WideRecipes
from lightning_eff.tune.search import Search
from tests.tune.tasks import Here, Regression, config

HERE = "tests.tune.test_narrowing.Wide"


class Wide(Regression):
    """The regression at any width."""

    def __init__(self, width: int = 64, lr: float = 3e-3, weight_decay: float = 0.01, extra: bool = False) -> None:
        super().__init__(lr, weight_decay)
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        if extra:
            self.net.append(nn.Linear(1, 1))


def configs(folder: Path) -> tuple[str, str]:
    wide = config(folder, f"model: {{class_path: {HERE}, init_args: {{width: 64}}}}")
    narrow = folder / "narrow.yaml"
    narrow.write_text("model: {init_args: {width: 16}}\n")
    return wide, str(narrow)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.tune.tuner.Places", Here)
    monkeypatch.setattr("lightning_eff.bench.benchmark.Workers", lambda *args: InProcess())


def test_a_rate_found_on_the_narrow_model_is_confirmed_on_the_wide_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr("lightning_eff.tune.tuner.Search", functools.partial(Search, limit=3))
    wide, narrow = configs(tmp_path)
    out, lines = tmp_path / "out", list[str]()
    settings: dict[str, Any] = {
        "target": "val_loss",
        "budget": 2.0,
        "search": "20m",
        "seeds": 2,
        "threads": 1,
        "jobs": 1,
    }
    results = NarrowTuner([wide], [narrow], out=out, **settings).run(progress=False, tell=lines.append)
    assert set(results["own"]) == {"rate", "weight_decay"}
    assert results["steps"] >= 1 and results["narrow_budget_seconds"] < 4.0
    assert all(not trial["choices"]["techniques"] for trial in results["trials"])

    found = yaml.safe_load((out / "recipe.yaml").read_text())
    assert found["model"]["init_args"]["lr"] == pytest.approx(results["own"]["rate"])
    assert found["model"]["init_args"]["width"] == 64
    (mup,) = found["trainer"]["callbacks"]
    assert mup["class_path"] == "lightning_eff.MuP"
    assert mup["init_args"]["base"]["class_path"] == HERE
    assert mup["init_args"]["base"]["init_args"]["width"] == 16
    arms = json.loads((out / results["bench"] / "results.json").read_text())["plan"]["arms"]
    assert {arm["name"] for arm in arms} == {"baseline", "recipe", "recipe: same learning rate"}
    assert "carried over by MuP" in results["sentence"]

    torch.manual_seed(0)  # the recipe is a config for fit
    cli.main(["fit", "--config", str(out / "recipe.yaml"), "--trainer.max_steps=2", "--trainer.logger=false"])


def test_only_learning_rate_and_weight_decay_carry_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide, narrow = configs(tmp_path)
    paths = [
        "--baseline",
        wide,
        "--narrow",
        narrow,
        "--target",
        "val_loss",
        "--budget",
        "2s",
        "--out",
        str(tmp_path / "o"),
    ]
    main([*paths, "--dry-run", "--threads", "1", "--quiet"])
    said = capsys.readouterr().out
    assert (
        "rate (model.init_args.lr" in said
        and "weight_decay (" in said
        and "Techniques to try, at most 4 together (0)" in said
    )
    assert "batch (" not in said and "warm_up (" not in said


def test_other_callbacks_stay_and_the_baseline_has_no_mup(tmp_path: Path) -> None:
    wide, narrow = configs(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text("trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.RichProgressBar}]}\n")
    tuner = NarrowTuner([wide], [narrow], out=tmp_path / "out", target="val_loss", budget=2.0, threads=1)
    look = tuner.look()
    recipes = WideRecipes([wide, str(other)], {"class_path": HERE}, look.recipes, scheduled=True)
    assert recipes.overlay(Choices(), 10) == {}
    callbacks = recipes.overlay(Choices({"rate": 0.1}), 10)["trainer"]["callbacks"]
    assert [one["class_path"].rpartition(".")[2] for one in callbacks] == ["RichProgressBar", "MuP"]


def test_a_narrow_model_that_is_no_base_is_refused_before_the_search(tmp_path: Path) -> None:
    wide, _ = configs(tmp_path)
    deeper = tmp_path / "deeper.yaml"
    deeper.write_text("model: {init_args: {width: 16, extra: true}}\n")
    settings: dict[str, Any] = {"target": "val_loss", "budget": 2.0, "search": "20m", "threads": 1, "jobs": 1}
    tuner = NarrowTuner([wide], [str(deeper)], out=tmp_path / "out", **settings)
    with pytest.raises(UsageError, match=r"--narrow: the wide model does not train .* differ in the parameters net\.5"):
        tuner.run(progress=False)
    assert not list((tmp_path / "out").glob("**/trials.json"))


def test_refused(tmp_path: Path) -> None:
    wide, narrow = configs(tmp_path)
    settings: dict[str, Any] = {"target": "val_loss", "budget": 2.0, "threads": 1, "out": tmp_path / "out"}
    with pytest.raises(UsageError, match=r"--narrow .*: there is no such file"):
        NarrowTuner([wide], ["nowhere.yaml"], **settings)
    with pytest.raises(UsageError, match="tries no techniques"):
        NarrowTuner([wide], [narrow], include=["Mixup"], **settings)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match="holds other files"):
        NarrowTuner([wide], [narrow], **settings).look()
