"""``lightning-eff plan`` from a config: the table, the picture, JSON, and what is said of arguments that cannot be used."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.planner.command import main
from tests.planner.models import Flat

ROOT = Path(__file__).parent.parent.parent


class FlatWithData(Flat):
    """Its own loader, no data module."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(Tensor(8, 64), Tensor(8).long()), batch_size=4)


def recipe(folder: Path, model: str = "examples.gpt.module.GPT", **trainer: Any) -> str:
    """A config for accelerators that this machine does not have."""
    config: dict[str, Any] = {
        "trainer": {"accelerator": "gpu", "devices": 8, "num_nodes": 4, "precision": "bf16-mixed", **trainer},
        "model": {"class_path": model},
    }
    if model.startswith("examples"):
        config["model"]["init_args"] = {"dim": 64, "num_layers": 4, "num_heads": 4, "block_size": 32}
        data = {"block_size": 32, "batch_size": 4, "max_bytes": 100_000}
        config["data"] = {"class_path": "examples.gpt.data.StdlibText", "init_args": data}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)


def test_table_picture_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(tmp_path, accumulate_grad_batches=2)
    main(["--config", config, "--gpus", "8", "--gpu", "H200", "--timeline", "out/line.png", "--json", "out/plan.json"])
    out, err = capsys.readouterr()
    plan = json.loads(Path("out/plan.json").read_text())
    assert Path("out/line.png").read_bytes().startswith(b"\x89PNG")
    assert plan["global_batch"] == 4 * 2 * 8 and "batch size 4 x accumulation 2 x --gpus 8" in out
    assert plan["profile"]["num_blocks"] == 4 and plan["profile"]["precision"]["name"] == "bf16-mixed"
    assert plan["profile"]["optimizer_state_bytes_per_parameter"] == 8
    assert len(plan["best"]) == 10 and len(re.findall(r"^  \d+ +\d+ +\d+ +\d+ ", out, re.M)) == 10
    times = [row["step_seconds"] for row in plan["best"]]
    assert times == sorted(times) and f"{times[0]:.4g}" in out
    assert sum(plan["best"][0]["parts_seconds"].values()) == pytest.approx(times[0])
    assert {f["setting"] for f in plan["families"]} >= {"tp = 1", "pp = 4", "1F1B", "sharded", "remat full"}
    assert all(row["dp"] * row["tp"] * row["pp"] == 8 for row in plan["best"])
    assert "strategy:\n    class_path: " in out and "stas00" in out and "efficiency = 0.74" in out
    assert "profiling a training step" in err
    assert "the model ignores the time to launch kernels" in out, "a module of this size is said to be slower"


def test_options_reach_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "--config",
        recipe(tmp_path),
        "--gpus",
        "4",
        "--gpu",
        "a100-80",
        "--timeline",
        "none",
        "--json",
        "-",
        "--quiet",
    ]
    main(base)
    plain = json.loads(capsys.readouterr().out)
    assert not Path("lightning_logs/plan").exists()
    numbers = ["--global-batch", "24", "--efficiency", "0.37", "--assume", "usable_memory=0.5"]
    main([*base, *numbers, "--fused", "--precision", "32-true"])
    out, err = capsys.readouterr()
    other = json.loads(out)
    assert not err and other["global_batch"] == 24
    assert other["assumptions"] == plain["assumptions"] | {
        "efficiency": 0.37,
        "fused": True,
        "usable_memory": 0.5,
    }
    assert other["profile"]["precision"]["tf32"]


def test_optimizer_of_the_config_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SGD with momentum has 4 bytes a parameter, and without it none."""
    path = Path(recipe(tmp_path))
    for momentum, size in ((0.9, 4), (0.0, 0)):
        optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": momentum}}
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"optimizer": optimizer}))
        main(["--config", str(path), "--gpus", "2", "--gpu", "h100", "--timeline", "none", "--json", "-", "--quiet"])
        assert json.loads(capsys.readouterr().out)["profile"]["optimizer_state_bytes_per_parameter"] == size


def test_module_without_blocks_is_planned_for_data_parallelism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe(tmp_path, f"{__name__}.FlatWithData")
    main(["--config", config, "--gpus", "4", "--gpu", "l40s", "--timeline", "none"])
    out = capsys.readouterr().out
    assert "no stack of blocks (data parallelism only)" in out and "of 4)" not in out
    assert "class_path: lightning.pytorch.strategies.DDPStrategy" in out
    assert "optimizer state assumed as AdamW's 8 bytes" in out, "the module has no optimizer: that is said"


def test_real_profile_is_the_fake_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "--config",
        recipe(tmp_path),
        "--gpus",
        "2",
        "--gpu",
        "h100",
        "--timeline",
        "none",
        "--json",
        "-",
        "--quiet",
    ]
    main(base)
    fake = capsys.readouterr().out
    main([*base, "--profile", "real"])
    assert capsys.readouterr().out == fake


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--gpu": "tpu"}, r"--gpu tpu: not in the table[\s\S]*mi300x"),
        ({"--gpus": "0"}, r"--gpus 0: expected at least 1"),
        ({"--global-batch": "-3"}, r"--global-batch -3: expected at least 1"),
        ({"--config": "missing.yaml"}, r"--config missing.yaml: no such file"),
        ({"--precision": "64-true"}, r"precision='64-true'\): expected 32-true"),
        ({"--layers": "nowhere"}, r"plan\(layers='nowhere'\)[\s\S]*Candidates: 'blocks' \(4 x Block\)"),
        ({"--efficiency": "0"}, r"efficiency=0.0\): expected a fraction"),
        ({"--assume": "speed=3"}, r"--assume speed=3: expected NAME=NUMBER\. Names: efficiency"),
        ({"--assume": "usable_memory=most"}, r"--assume usable_memory=most: expected NAME=NUMBER"),
        ({"--gpu": "a100-40", "--fp8": None}, r"it has no FP8"),
        ({"--gpu": "h2000"}, r"--gpu h2000: not in the table[\s\S]* Did you mean h200\?"),
        ({"--assume": "efficency=0.5"}, r"Did you mean efficiency\?"),
        ({"--json": "."}, r"--json \.: it is a folder"),
        ({"--timeline": "recipe.yaml/line.png"}, r"--timeline recipe.yaml/line.png: it cannot be written"),
        ({"--config": "list.yaml"}, r"--config list.yaml: it contains a list\. Pass a LightningCLI config, a mapping"),
        ({"--config": "broken.yaml"}, r"--config broken.yaml: not valid YAML"),
    ],
)
def test_bad_arguments_are_said(
    change: dict[str, str | None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("list.yaml").write_text("[1, 2]")
    Path("broken.yaml").write_text("model: [")
    given: dict[str, str | None] = {"--config": recipe(tmp_path), "--gpus": "4", "--gpu": "h200", "--timeline": "none"}
    argv = [word for item in (given | change).items() for word in item if word is not None]
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_slips_are_found_before_anything_is_imported(tmp_path: Path) -> None:
    """Torch, Lightning and the user's module are poisoned: importing one of them would be the error that is told."""
    config = recipe(tmp_path, "poisoned.module.Net")
    slips = [
        ["--config", config, "--gpus", "4", "--gpu", "h2000"],
        ["--config", config, "--gpus", "four", "--gpu", "h200"],
        ["--config", config, "--gpus", "0", "--gpu", "h200"],
        ["--config", config, "--gpus", "4", "--gpu", "h200", "--global-batch", "0"],
        ["--config", config, "--gpus", "4", "--gpu", "h200", "--efficency", "0.3"],
        ["--config", config, "--gpus", "4", "--gpu", "h200", "--efficiency", "3"],
        ["--config", config, "--gpus", "4", "--gpu", "h200", "--assume", "speed=1"],
        ["--config", config, "--gpus", "4", "--gpu", "h200", "--precision", "8"],
        ["--config", config, "--gpus", "4", "--gpu", "a100-80", "--fp8"],
        ["--config", config, "--gpus", "4", "--gpu", "h200", "--json", "."],
        ["--config", "missing.yaml", "--gpus", "4", "--gpu", "h200"],
        ["--gpus", "4"],
    ]
    code = (
        "import sys, json\n"
        "sys.modules.update(dict.fromkeys(['torch', 'lightning', 'poisoned', 'numpy', 'jsonargparse']))\n"
        "from lightning_eff.cli import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    try: main(['plan', *argv])\n"
        "    except SystemExit as stop: print(stop.code)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(slips)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["2"] * len(slips), done.stderr
    assert "import of" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    fine = subprocess.run(
        [*command[:3], json.dumps([[*slips[0][:-1], "h200"]])], capture_output=True, text=True, check=False
    )
    assert "jsonargparse is not installed" in fine.stderr, "what is not wrong goes on to where imports are needed"


def test_missing_matplotlib_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    argv = ["--config", recipe(tmp_path), "--gpus", "2", "--gpu", "h200"]
    with pytest.raises(SystemExit):
        main(argv)
    out, err = capsys.readouterr()
    assert "pip install -c constraints.txt '.[bench]'" in err and "--timeline none" in err and not out
    main([*argv, "--timeline", "none"])
    assert "The fastest layouts" in capsys.readouterr().out


def test_no_data_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(tmp_path, "tests.planner.models.Flat")
    with pytest.raises(SystemExit):
        main(["--config", config, "--gpus", "4", "--gpu", "h200"])
    assert "names no data" in capsys.readouterr().err


def test_a_module_of_the_other_package_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alike but for the names in the config that is proposed, which its own LightningCLI reads."""
    told: list[str] = []
    for home in ("tests", "tests.pl"):
        path = tmp_path / f"{home}.yaml"
        named = {"model": f"{home}.models.TinyGPT", "data": f"{home}.cli_data.Sequences"}
        path.write_text(yaml.safe_dump({key: {"class_path": name} for key, name in named.items()}))
        main(["--config", str(path), "--gpus", "4", "--gpu", "h200", "--timeline", "none"])
        told.append(capsys.readouterr().out.replace(f"{home}.yaml", "config.yaml"))
    assert "The fastest layouts" in told[0]
    assert told[1].replace("pytorch_lightning", "lightning.pytorch") == told[0]


def test_out_of_memory_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", recipe(tmp_path), "--gpus", "2", "--gpu", "h200", "--assume", "usable_memory=1e-5"]
    main(argv)
    out = capsys.readouterr().out
    assert "No layout fits: the smallest of" in out and not Path("lightning_logs/plan").exists()
