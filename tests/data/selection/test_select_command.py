"""``lightning-eff select``: files that SampleSubset and DataPruning train on, from text and from a module's scores."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lightning_eff import DataPruning, SampleSubset, cli
from lightning_eff.data.selection._offline import dsir
from lightning_eff.data.selection._offline.files import read
from tests.data.selection.test_dsir import InThisProcess
from tests.models import TinyClassifier, make_batch


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    home = getattr(request, "param", "tests")
    path = tmp_path / "config.yaml"
    techniques = [{"class_path": "SampleSubset", "init_args": {"samples": 0.5}}]  # left out here
    recipe = {
        "trainer": {"accelerator": "cpu", "max_steps": 3, "callbacks": techniques},
        "model": {"class_path": f"{home}.models.TinyClassifier"},
        "data": {"class_path": f"{home}.cli_data.Classes"},
    }
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_text_is_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dsir, "ProcessPoolExecutor", InThisProcess)
    raw, target, out = (str(tmp_path / name) for name in ("raw.txt", "target.jsonl", "kept.json"))
    Path(raw).write_text("".join(f"{word} number {i}\n" for i in range(20) for word in ("cats purr", "rates rise")))
    Path(target).write_text("".join(json.dumps({"body": f"rates rise {i}"}) + "\n" for i in range(9)))
    arguments = ["select", "dsir", "--raw", raw, "--target", target, "--field", "body", "--out", out, "--quiet"]
    cli.main([*arguments, "--keep", "0.5"])
    assert read(out, "indices", who="").values.tolist() == [*range(1, 40, 2)]
    assert read(out, "indices", who="").num_samples == 40 and not (tmp_path / "kept.json.work").exists()
    assert "kept 20 of 40 documents in" in capsys.readouterr().out
    cli.main([*arguments, "--keep", "7", "--seed", "1"])
    first = read(out, "indices", who="").values.tolist()
    cli.main([*arguments, "--keep", "7", "--seed", "2"])
    assert len(first) == 7 and first != read(out, "indices", who="").values.tolist()


@pytest.mark.parametrize("config", ["tests", "tests.pl"], ids=["lightning", "pytorch_lightning"], indirect=True)
def test_samples_are_selected_by_a_modules_scores(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the module as it is made, and as a checkpoint has it; SampleSubset and DataPruning take what is written."""
    out, scores, checkpoint = (str(tmp_path / name) for name in ("kept.json", "scores.npz", "a.ckpt"))
    torch.manual_seed(9)
    net = TinyClassifier().eval()
    torch.save({"state_dict": net.state_dict()}, checkpoint)
    arguments = ["select", "prune", "--config", config, "--score", "el2n", "--keep", "0.4", "--out", out]
    cli.main([*arguments, "--ckpt-path", checkpoint, "--scores", scores])
    x, y = make_batch("classifier", 20)
    errors = (net(x).softmax(1) - torch.nn.functional.one_hot(y, 3)).norm(dim=1).detach().numpy()
    np.testing.assert_allclose(read(scores, "scores", who="").values, errors, rtol=1e-5)
    told = read(out, "indices", who="")
    assert told.values.tolist() == sorted(errors.argsort()[-8:]) and told.fingerprint
    assert "kept 8 of 20 samples, the hardest by el2n" in capsys.readouterr().out
    assert SampleSubset(out).told is not None and DataPruning(scores).told is not None
    cli.main([*arguments, "--easy", "--ckpt-path", checkpoint])
    assert read(out, "indices", who="").values.tolist() == sorted(errors.argsort()[:8])


def test_a_texts_length_and_fingerprint_are_those_of_the_data_set(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dsir, "ProcessPoolExecutor", InThisProcess)
    raw, out = str(tmp_path / "raw.txt"), str(tmp_path / "kept.npz")
    arguments = [
        "select",
        "dsir",
        "--raw",
        raw,
        "--target",
        raw,
        "--keep",
        "3",
        "--out",
        out,
        "--config",
        config,
        "--quiet",
    ]
    Path(raw).write_text("a b\n" * 20)
    cli.main(arguments)
    assert read(out, "indices", who="").fingerprint
    Path(raw).write_text("a b\n" * 19)
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "has 19 documents, but the data set of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prun"], "got 'prun'; expected dsir or prune"),
        (["dsir", "--raw", "gone.txt", "--target", "x", "--keep", "1", "--out", "a.json"], "gone.txt: no such file"),
        (["dsir", "--raw", "gone.txt", "--target", "x", "--keep", "1", "--out", "a.csv"], "ends in .json or .npz"),
        (["dsir", "--raw", "pyproject.toml", "--target", "pyproject.toml", "--keep", "1.5", "--out", "a.json"], "a fraction"),
        (["prune", "--config", "gone.yaml", "--keep", "0.5", "--out", "a.json"], "no such file"),
        (["prune", "--config", "gone.yaml", "--keep", "5", "--out", "a.json"], r"--keep 5: expected a fraction"),
        (["prune", "--config", "gone.yaml", "--keep", "0.5", "--out", "a.json", "--scre", "el2n"], "Did you mean '--score'"),
    ],
)  # fmt: skip
def test_what_cannot_be_selected_is_told(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(SystemExit) as stopped:
        cli.main(["select", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_help_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["select"])
    out = capsys.readouterr().out
    assert "select dsir" in out and "select prune" in out
