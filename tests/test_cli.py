"""The command line: LightningCLI with short names, the table of techniques, the closing report, and the examples."""

import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback

import lightning_eff
from lightning_eff import cli
from lightning_eff._catalogue import catalogue
from lightning_eff._cli.config import ConfigParser
from lightning_eff.monitor.training_report import TrainingReport
from tests.cases import CASES
from tests.cli_data import unannotated
from tests.models import TinyClassifier, loader, trainer

ROOT = Path(__file__).parent.parent


def config(tmp_path: Path, callbacks: list[dict[str, Any]], **trainer: Any) -> str:
    """A recipe for a GPT of a few steps."""
    path = tmp_path / "recipe.yaml"
    recipe = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 8,
            "val_check_interval": 4,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "default_root_dir": str(tmp_path),
            "callbacks": callbacks,
            **trainer,
        },
        "model": {
            "class_path": "examples.gpt.module.GPT",
            "init_args": {"dim": 16, "num_layers": 4, "num_heads": 2, "block_size": 32},
        },
        "data": {
            "class_path": "examples.gpt.data.StdlibText",
            "init_args": {"block_size": 32, "batch_size": 4, "max_bytes": 100_000},
        },
    }
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_fit_with_short_names_ends_in_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    callbacks = [
        {"class_path": "ProgressiveStacking", "init_args": {"stages": [[0.0, 2], [0.5, 4]]}},
        {"class_path": "LatestWeightAveraging", "init_args": {"window": 2, "interval": 2}},
        {"class_path": "lightning_eff.SequenceLengthWarmup", "init_args": {"start": 16, "until": 0.5}},
        {"class_path": "SelectiveBackprop", "init_args": {"keep": 0.5}},
        {"class_path": "EfficiencyMonitor"},
    ]
    cli.main(["fit", "--config", config(tmp_path, callbacks)])
    out = capsys.readouterr().out
    report = out[out.index("What this run did") :]
    lines = {line.split()[0]: line for line in report.splitlines()[1:] if line.startswith("  ")}
    assert "1,024 in 8 steps" in report  # 8 steps of 4 x 32 tokens
    assert float(report.split("val_loss")[1].split()[0]) > 0
    assert "eff/" not in report, "what a monitor logs is no result of validation"
    assert "MiB" in report
    assert "2" in lines["ProgressiveStacking"] and "4" in lines["ProgressiveStacking"]
    assert "mean of the last 2" in lines["LatestWeightAveraging"]
    assert "16" in lines["SequenceLengthWarmup"] and "32" in lines["SequenceLengthWarmup"]
    assert "11 forward" in report, "one scoring pass a step, and three that look at the first batch"


def test_the_bar_counts_no_epochs_that_there_are_not_and_the_report_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is warned of at the start that this command causes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FORCE_COLOR", "1")  # for the bar to be drawn without a terminal
    warnings.filterwarnings("error", "LightningCLI's args parameter")
    warnings.filterwarnings("error", ".*LeafSpec")  # Lightning's of torch, which the command keeps from its users
    cli.main(["fit", "--config", config(tmp_path, [], max_steps=2, enable_progress_bar=True)])
    out = capsys.readouterr().out
    assert "Epoch 0" in out and "/-" not in out
    assert out.rindex("Epoch 0") < out.index("What this run did")
    cli.main(["fit", "--config", config(tmp_path, [], max_steps=-1, max_epochs=1, enable_progress_bar=True)])
    assert "Epoch 0/0" in capsys.readouterr().out


def test_resume_and_validate_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    saver = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(tmp_path), "every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}"},
    }
    callbacks = [{"class_path": "ProgressiveLayerDropping"}, saver]
    recipe = config(tmp_path, callbacks)
    cli.main(["fit", "--config", recipe])
    whole = capsys.readouterr().out
    cli.main(["fit", "--config", recipe, "--ckpt_path", str(tmp_path / "step=4.ckpt")])
    resumed = capsys.readouterr().out
    assert whole.split("val_loss")[1].split()[0] == resumed.split("val_loss")[1].split()[0]
    assert "tokens seen" in whole and "1,024 in 8 steps" in whole
    assert "1,024 in 8 steps" in resumed and "of training since step 4" in resumed
    cli.main(["validate", "--config", recipe, "--ckpt_path", str(tmp_path / "step=8.ckpt")])


@pytest.mark.parametrize("named", ["tests.cli_data.unannotated", {"class_path": "tests.cli_data.Unannotated"}])
def test_a_config_names_a_function_that_does_not_say_what_it_returns(
    named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    callbacks = [{"class_path": "SelectiveBackprop", "init_args": {"keep": 0.5, "sample_loss": named}}]
    recipe = yaml.safe_load(Path(config(tmp_path, callbacks, max_steps=2, limit_val_batches=0)).read_text())
    recipe |= {"model": {"class_path": "tests.models.TinyClassifier"}, "data": {"class_path": "tests.cli_data.Classes"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    cli.main(["fit", "--config", str(tmp_path / "recipe.yaml")])
    assert "in 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SuperMix", "TokenMix"])
def test_a_config_names_a_teacher_that_does_not_say_what_it_returns(name: str) -> None:
    parser = ConfigParser(exit_on_error=False)
    parser.add_subclass_arguments(getattr(lightning_eff, name), "technique")
    given = {"class_path": name, "init_args": {"teacher": "tests.cli_data.unannotated"}}
    made = parser.instantiate_classes(parser.parse_object({"technique": given}))
    assert made["technique"].teacher is unannotated


def test_a_report_counts_a_batch_once_and_says_what_it_does_not_know() -> None:
    """A checkpoint of within a step counts without the batch, which is trained on again; one of before is counted from."""
    states = []

    class Looks(Callback):
        def on_before_backward(self, *args: Any) -> None:
            states.append(report.state_dict())

        def on_train_batch_end(self, *args: Any) -> None:
            states.append(report.state_dict())

    def told(*states: dict[str, int], first: int = 2) -> list[str]:
        """What is told of a run of four steps of 4 samples, ``first`` of them before, and its rate times its seconds."""
        t = trainer(report, Looks(), max_steps=first)
        net, data = TinyClassifier(), loader("classifier", 40)
        t.fit(net, data)
        t.fit_loop.epoch_loop.max_steps = 4
        for state in states:
            report.load_state_dict(state)
        t.fit(net, data)
        return [line.split("  ")[-1] for line in report.text(t, net).splitlines() if "samples" in line]

    report = TrainingReport()
    seen, rate = told()
    assert seen == "8 in the last 2 of 4 steps" and "since step 2" in rate
    assert [state["samples"] for state in states] == [0, 4, 4, 8, 0, 4, 4, 8]
    seen, rate = told({"tokens": 0, "samples": 8, "uncounted_steps": 0})
    assert seen == "16 in 4 steps"
    per_second, seconds = float(rate.split()[0].replace(",", "")), report._seconds
    assert per_second == pytest.approx(8 / seconds, abs=0.51)
    seen, _ = told({"tokens": 0, "samples": 4, "uncounted_steps": 1})
    assert seen == "12 in the last 3 of 4 steps"


def test_techniques_lists_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["techniques"])
    out = capsys.readouterr().out
    strategies = {"CompressedDDPStrategy", "DeepSpeedEffStrategy", "HybridParallelStrategy"}
    for name in CASES.keys() | strategies:
        cls = getattr(lightning_eff, name)
        assert name in out and cls.kind in out
        assert cls.paper.split()[0] in out
    for width in (130, 160):
        assert max(map(len, catalogue.table(catalogue.chosen(), width).splitlines())) <= width
    with pytest.raises(SystemExit):
        cli.main(["techniques", "--what"])


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])
    assert capsys.readouterr().out.split() == ["lightning-eff", metadata.version("lightning-eff")]
    assert lightning_eff.__version__ == metadata.version("lightning-eff")


def test_help_names_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(word in out for word in cli.COMMANDS)


def test_help_of_a_subcommand_is_called_by_the_commands_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["fit", "--help"])
    assert capsys.readouterr().out.startswith("usage: lightning-eff ")


@pytest.mark.parametrize("example", ["gpt", "vit", "huggingface"])
def test_efficient_recipe_differs_only_in_callbacks_plugins_strategy_and_loader(example: str) -> None:
    folder = ROOT / "examples" / example
    baseline, efficient = (yaml.safe_load((folder / f"{kind}.yaml").read_text()) for kind in ("baseline", "efficient"))
    free = {"callbacks", "plugins", "strategy", "logger"}
    loader_settings = {"batch_size", "num_workers", "shuffle", "pin_memory"}
    for recipe in (baseline, efficient):
        for key in free:
            recipe["trainer"].pop(key, None)
        for key in loader_settings:
            recipe["data"].get("init_args", {}).pop(key, None)
    assert baseline == efficient


@pytest.mark.parametrize("example", ["gpt", "vit", "huggingface"])
@pytest.mark.parametrize("kind", ["baseline", "efficient"])
@pytest.mark.filterwarnings("ignore:LatestWeightAveraging.* nothing will be averaged")
def test_example_recipes_run(
    example: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every recipe starts, trains and validates: four steps of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    short = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    recipe = str(ROOT / "examples" / example / f"{kind}.yaml")
    cli.main(["fit", "--config", recipe, *short, "--trainer.enable_progress_bar=false"])
    report = capsys.readouterr().out.split("What this run did")[1]
    assert "in 4 steps" in report and "val_loss" in report
    if kind == "efficient":
        assert all(
            c["class_path"] in report for c in yaml.safe_load(Path(recipe).read_text())["trainer"]["callbacks"][:2]
        )


def test_import_is_from_the_console_script_too() -> None:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lightning_eff.cli", "techniques"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert "ProgressiveStacking" in out
