"""``--recipe`` of the command line: beside the config's own callbacks, and in the config that is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_eff import cli
from lightning_eff._cli.config import ConfigCLI
from lightning_eff.bench.arms import Arm
from lightning_eff.recipes.command import listed, shown
from lightning_eff.recipes.shipped import RECIPES

ROOT = Path(__file__).parent.parent.parent


def config(folder: Path, callbacks: list[dict[str, Any]], tests: str = "tests", **rest: Any) -> str:
    """A config that trains a ``TinyGPT`` of the tests for some steps."""
    path = folder / "mine.yaml"
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": str(folder),
        "callbacks": callbacks,
    }
    trainer = {**settings, **rest.pop("trainer", {})}
    model = {"class_path": f"{tests}.models.TinyGPT"}
    text = {
        "seed_everything": 1,
        "trainer": trainer,
        "model": model,
        "data": {"class_path": f"{tests}.cli_data.Sequences"},
    }
    path.write_text(yaml.safe_dump({**text, **rest}))
    return str(path)


def saved(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("config.yaml")
    return yaml.safe_load(path.read_text())


def classes(callbacks: list[dict[str, Any]]) -> list[str]:
    return [callback["class_path"].rpartition(".")[2] for callback in callbacks]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.rglob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    return torch.load(newest, weights_only=True)["state_dict"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(ROOT)
    caplog.set_level("INFO")


def test_the_saved_config_holds_the_callbacks_and_repeats_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    cli.main(["fit", "--config", config(first, [{"class_path": "LoaderTuning"}]), "--recipe", "gpt:fast"])
    assert "recipe gpt:fast (version 1) for TinyGPT" in caplog.text
    found = saved(first)
    assert found["recipe"] is None
    # three steps are no room for stages
    assert classes(found["trainer"]["callbacks"]) == ["LoaderTuning", "ReplaceOptimizer", "UsedRecipe"]
    assert found["trainer"]["callbacks"][-1]["init_args"] == {"name": "gpt", "version": 1, "variant": "fast"}
    (path,) = first.rglob("config.yaml")
    monkeypatch.setattr("lightning_eff.recipes.resolving.RECIPES", {})  # a later release has other recipes
    cli.main(["fit", "--config", str(path), "--trainer.default_root_dir", str(again)])
    one, other = weights(first), weights(again)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_own_callbacks_stay_and_the_recipe_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = {
        "class_path": "ReplaceOptimizer",
        "init_args": {"optimizer": {"class_path": "lightning_eff.Lion", "init_args": {"lr": 1e-3}}},
    }
    cli.main(["fit", "--config", config(tmp_path, [mine], trainer={"max_steps": 300}, recipe="gpt:fast"), *few()])
    assert "leaves out ReplaceOptimizer: you have one of your own, which stays as it is" in caplog.text
    found = saved(tmp_path)["trainer"]["callbacks"]
    assert classes(found) == ["ReplaceOptimizer", "ProgressiveStacking", "UsedRecipe"]
    assert found[0]["init_args"]["optimizer"]["class_path"] == "lightning_eff.Lion"


def few() -> list[str]:
    """Options for a run of which only the first steps are of interest."""
    return ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "3"]


def test_a_callback_that_is_not_in_a_list(tmp_path: Path) -> None:
    path = config(tmp_path, [])
    cli.main(["fit", "--config", path, "--recipe", "exact", "--trainer.callbacks=FusedNorms"])
    assert classes(saved(tmp_path)["trainer"]["callbacks"]) == ["FusedNorms", "LoaderTuning", "UsedRecipe"]


def test_techniques_that_the_trainer_refuses_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    endless = config(tmp_path, [], trainer={"max_steps": -1, "max_epochs": -1})
    found = unrun(["fit", "--config", endless, "--recipe", "gpt:fast"])
    assert "leaves out ProgressiveStacking: the Trainer has no end" in caplog.text
    assert "ReplaceOptimizer" in found and "ProgressiveStacking" not in found
    plugged = {"plugins": [{"class_path": "StochasticRoundingBF16"}]}
    with pytest.raises(SystemExit) as exit_:
        cli.main(["fit", "--config", config(tmp_path, [], trainer=plugged), "--recipe", "gpt"])
    assert exit_.value.code == 2
    assert "nothing of it is left for TinyGPT: ReplaceOptimizer (the precision plugin" in capsys.readouterr().err


def unrun(argv: list[str]) -> list[str]:
    """The classes of a trainer's callbacks that ``argv`` makes."""

    class Unrun(ConfigCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            pass

    cli_ = Unrun(argv, save_config_callback=None)
    return [type(callback).__name__ for callback in cli_.trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_module_of_pytorch_lightning(tmp_path: Path) -> None:
    path = config(tmp_path, [], tests="tests.pl")
    cli.main(["fit", "--config", path, "--recipe", "gpt"])
    assert classes(saved(tmp_path)["trainer"]["callbacks"]) == ["ReplaceOptimizer", "UsedRecipe"]


def test_a_bench_takes_a_config_with_a_recipe(tmp_path: Path) -> None:
    arm = Arm("r", "recipe", (config(tmp_path, [], recipe="gpt"),))
    found = [type(callback).__name__ for callback in arm.build(0).trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    assert {"ReplaceOptimizer", "UsedRecipe"} <= {*found}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["fit", "--config", "CONFIG", "--recipe", "gtp"],
            "recipe(name='gtp'): there is no such recipe. Did you mean 'gpt'?",
        ),
        (
            ["fit", "--config", "CONFIG", "--recipe", "gpt:fats"],
            "variant='fats'): there is no such variant. Did you mean 'fast'?",
        ),
        (
            ["fit", "--config", "CONFIG", "--recipe", "vit"],
            "recipe(name='vit'): TinyGPT does not suit it, because it has an",
        ),
        (["recipe", "show", "gtp"], "Did you mean 'gpt'?"),
        (["recipe", "show"], "show needs a name, such as gpt"),
        (["recipe", "list", "gpt"], "list takes no name"),
        (["recipe", "lst"], "invalid choice: 'lst' (choose from 'list', 'show')"),
    ],
)
def test_errors_in_a_paragraph(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, [])
    with pytest.raises(SystemExit) as exit_:
        cli.main([path if word == "CONFIG" else word for word in argv])
    assert exit_.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith(f"lightning-eff {argv[0]}: ") and message in told


# -- lightning-eff recipe


def test_list_has_every_recipe_with_its_version_and_variants(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipe", "list"])
    told = capsys.readouterr().out
    assert told.strip() == listed()
    for one in RECIPES.values():
        assert f"{one.name:<12} version {one.version}  {one.about}" in told
        assert all(about in told for about in one.variants.values())


@pytest.mark.parametrize("name", [f"{name}:{variant}" for name, one in RECIPES.items() for variant in one.variants])
def test_show_prints_python_and_yaml_that_make_the_same_callbacks(name: str, tmp_path: Path) -> None:
    text = shown(name)
    python = text.partition("# Python\n")[2].partition("\n# YAML\n")[0]
    yaml_text = text.partition("# YAML\n")[2].partition("\n\n")[0]
    made: dict[str, Any] = {}
    exec(python, made)
    expected = [repr(c) for c in made["trainer"].callbacks if type(c).__module__.startswith("lightning_eff")]
    section = yaml.safe_load(yaml_text)["trainer"]
    path = Path(config(tmp_path, section["callbacks"], trainer={"max_steps": section["max_steps"], "logger": False}))

    class Unrun(ConfigCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            pass

    trainer = Unrun(["fit", "--config", str(path)], save_config_callback=None).trainer
    found = [type(c).__name__ for c in trainer.callbacks if type(c).__module__.startswith("lightning_eff")]  # pyright: ignore[reportAttributeAccessIssue]
    assert expected and [one.partition("(")[0] for one in expected] == found
    assert trainer.max_steps == made["trainer"].max_steps
