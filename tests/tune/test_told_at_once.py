"""What cannot be used is told before anything runs, in words that help."""

from pathlib import Path
from typing import Any

import pytest

from lightning_eff._cli.errors import UsageError
from lightning_eff.tune.tuner import Tuner
from tests.tune.tasks import Here, config

pytest.importorskip("optuna")
NEUTRAL = "tests.tune.tasks.Neutral"


def tuner(folder: Path, **more: Any) -> Tuner:
    return Tuner(
        **{"baseline": config(folder), "target": "val_loss", "budget": 20, "out": folder / "out", "threads": 1, **more}
    )


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"width": {"key": "model.init_args.widht", "values": [8]}},
            r"own.width: the config does not accept model.init_args.widht=8: ",
        ),
        (
            {"rate": {"key": "model.init_args.learning_rat", "low": 0.001, "high": 0.1}},
            r"has no argument 'learning_rat'\. Expected init_args among .* schedule\.$",
        ),
        (
            {"rows": {"key": "data.init_args.rows", "values": [512, "many"]}},
            r"own.rows: the config does not accept data.init_args.rows='many': ",
        ),
        (
            {"warm_up": {"key": "model.init_args.warmup_steps", "low": 0.1, "high": 0.3}},
            r"not accept model.init_args.warmup_steps=0.1: .* Set in_steps: true for a key in optimizer steps",
        ),
    ],
)
def test_a_key_or_a_value_that_the_config_cannot_have_is_told_before_it_trains(
    own: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tuner, "_profile", lambda *args: pytest.fail("it trains"))
    with pytest.raises(UsageError, match=message):
        tuner(tmp_path, space={"own": own}, include=[NEUTRAL]).look()


def test_what_the_config_can_have_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trained(Exception): ...

    def trains(*args: object) -> None:
        raise Trained

    monkeypatch.setattr(Tuner, "_profile", trains)
    own = {
        "warm_up": {"key": "model.init_args.warmup_steps", "low": 0.1, "high": 0.3, "in_steps": True},
        "rows": {"key": "data.init_args.rows", "low": 256, "high": 512},
        "clip": {"key": "trainer.gradient_clip_val", "values": [None, 1.0]},
        "rate": {"low": 1e-4, "high": 1e-2, "log": True},
        "batch": {"key": "data.init_args.batch_size"},
        "weight_decay": False,
    }
    with pytest.raises(Trained):
        tuner(tmp_path, space={"own": own}, include=[NEUTRAL]).look()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mode": "lower"}, r"mode='lower'\): expected 'min' or 'max', or None: the direction"),
        ({"baseline": config}, r"Got the baseline '<function config.*which is not a file"),
        ({"include": ["./mine.py"]}, r"Got the technique './mine.py', which cannot be imported"),
        ({"include": "KFACC"}, r"Got the unknown technique 'KFACC'; .* Did you mean 'KFAC'"),
    ],
)
def test_an_argument_that_is_none_is_told_with_what_is_expected(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tuner(tmp_path, **more).look()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match=r"out is a file\. Name a folder with --out"):
        tuner(tmp_path).look()


def test_where_nothing_applies_the_reasons_are_of_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_eff.tune.tuner.Places", Here)
    with pytest.raises(UsageError, match=r"nothing to search \(PatchDropout: samples are not images or frames; "):
        tuner(tmp_path, search=1e6, include=["PatchDropout"]).run(progress=False)
