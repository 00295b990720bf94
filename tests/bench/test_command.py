"""``lightning-eff bench`` on configs: killed, continued, drawn again and compared."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_eff.bench import command
from lightning_eff.cli import main

ROOT = Path(__file__).parent.parent.parent
CONFIG = """
seed_everything: 3
ckpt_path: null
trainer: {accelerator: cpu, devices: 1, max_epochs: 2, val_check_interval: 3, callbacks: [CALLBACKS]}
model: {class_path: tests.bench.tasks.Small, init_args: {lr: 0.1}}
data: {class_path: tests.bench.tasks.Data}
"""


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, str]:
    """A baseline, a recipe with everything that a bench leaves out, and one that kills its process."""
    crowd = ", ".join(
        f"{{class_path: lightning.pytorch.callbacks.{name}}}"
        for name in ("ModelCheckpoint", "LearningRateMonitor", "RichProgressBar")
    )
    stop = "{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val_loss, patience: 0}}"
    texts = {
        "base": CONFIG.replace("CALLBACKS", ""),
        "copy": CONFIG.replace("CALLBACKS", f"{crowd}, {stop}"),
        "deadly": "trainer: {callbacks: [{class_path: tests.bench.tasks.Die, init_args: {at: 150}}]}",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: str(tmp_path / f"{name}.yaml") for name in texts}


def options(configs: dict[str, str], out: Path, *more: str) -> list[str]:
    asked = ["--baseline", configs["base"], "--recipe", configs["copy"], "--target", "val_loss", "--budget", "1rs"]
    return ["bench", *asked, "--seeds", "1", "--rounds", "2", "--threads", "1", "--out", str(out), "--quiet", *more]


def test_killed_and_taken_up(configs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bench that is killed after its first run continues. A recipe whose process dies is reported, and the bench finishes.

    The baseline has all callbacks that a bench removes. Each process takes seconds to start, so there are only two arms.
    """
    out = tmp_path / "out"
    arms = ["--baseline", f"base={configs['copy']}", "--recipe", f"dies={configs['base']},{configs['deadly']}"]
    command = ["bench", *arms, *options(configs, out)[5:]]
    argv = [sys.executable, "-m", "lightning_eff.cli", *command]
    bench = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    end = time.monotonic() + 200
    while not list(out.glob("runs/*.json")) and time.monotonic() < end and bench.poll() is None:
        time.sleep(0.05)
    os.killpg(bench.pid, signal.SIGKILL)
    bench.wait()
    done = {
        file: file.stat().st_mtime_ns for folder in ("rehearsals", "runs") for file in (out / folder).glob("*.json")
    }
    assert list(out.glob("runs/*.json"))
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        main(command)
    finally:
        os.chdir(here)
    assert {file: file.stat().st_mtime_ns for file in done} == done
    results = json.loads((out / "results.json").read_text())
    assert {(run["arm"], run["status"]) for run in results["runs"]} == {
        ("base", "finished"),
        ("dies", "crashed"),
    }
    assert "signal 9" in next(run["error"] for run in results["runs"] if run["arm"] == "dies")
    assert results["plan"]["arms"][1]["configs"][0].endswith(CONFIG.replace("CALLBACKS", ""))
    printed = capsys.readouterr().out
    assert "dies" in printed and "report.html" in printed
    assert (out / "report.html").stat().st_size > 10_000 and list((out / "figures").glob("*.png"))

    (out / "report.html").unlink()
    main(["bench", "report", str(out)])
    assert (out / "report.html").is_file()
    capsys.readouterr()
    main(["bench", "compare", str(out), str(out)])
    assert "dies" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_several_budgets_with_a_logger(
    configs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bench at each budget with the same step costs, a page over both, and curves of both in one logger."""
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    main(options(configs, out, "--budget", "1rs,2rs", "--logger", "CSVLogger,name=curves"))
    results = {name: json.loads((out / name / "results.json").read_text()) for name in ("1rs", "2rs")}
    costs = []
    for name, found in results.items():
        assert {run["status"] for run in found["runs"]} == {"finished"}
        assert found["plan"]["budget"] == {"seconds": float(name[0]), "clock": "reference"}
        costs.append({price["kind"]: price["seconds"] for price in found["calibration"]["base"]["prices"]})
        assert (out / name / "report.html").is_file() and list((out / name / "figures").glob("*.png"))
    assert costs[0] == costs[1], "the second bench reads the first one's prices"
    page = (out / "report.html").read_text()
    assert all(f'href="{name}/report.html"' in page for name in results) and (out / "budgets.png").is_file()
    assert "all budgets" in capsys.readouterr().out
    (metrics,) = out.glob("curves/version_*/metrics.csv")
    with metrics.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for name, found in results.items():
        for run in found["runs"]:
            key = f"{name}/{run['arm']}/seed{run['seed']}/val_loss"
            assert [float(row[key]) for row in rows if row[key]] == pytest.approx([p["metric"] for p in run["points"]])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["report", "nowhere"], "no such file"),
        (
            ["--baseline", "a.yaml", "--recipe", "b.yaml", "--target", "x", "--budget", "1s"],
            "there is no file 'a.yaml'",
        ),
    ],
)
def test_says_what_it_cannot_use(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *argv])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_refusals_end_with_status_2(
    configs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_eff.bench.pace import Incomparable

    class Refusing:
        def __init__(self, *args, **kwargs):
            raise Incomparable("apples and pears")

    monkeypatch.setattr("lightning_eff.bench.benchmark.Benchmark", Refusing)
    with pytest.raises(SystemExit) as stop:
        command.main(options(configs, tmp_path / "out")[1:])
    assert stop.value.code == 2 and "apples and pears" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--seeds", "three"), ("--seeds", "1,x"), ("--ladder", "half"), ("--seeds", "")]
)
def test_numbers_that_are_none(
    configs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*options(configs, tmp_path / "out"), f"{option}={value}"])
    assert stop.value.code == 2 and f"got {option} {value!r}" in capsys.readouterr().err


def test_names_must_differ(configs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*options(configs, tmp_path), "--recipe", configs["copy"]])
    assert "two arms named 'copy'" in capsys.readouterr().err
