"""A callback of the user's measures what the baseline measures of the same weights, and trains while the clock runs."""

from pathlib import Path
from typing import Any

import pytest

from lightning_eff.bench.pace import Incomparable
from lightning_eff.tune.config import Choices
from lightning_eff.tune.honesty import early, mismeasures
from lightning_eff.tune.trials import Trials
from lightning_eff.tune.tuner import Tuner
from tests.tune.tasks import Here, config

MEASURED = "and the target of the same weights in the baseline is"
WHY = {
    "Averaged": None,
    "Neutral": None,
    "Compiled": None,
    "Counting": None,
    "ScaledLog": MEASURED,
    "EasyLabels": MEASURED,
    "SomeRows": MEASURED,
    "OtherFunction": MEASURED,
    "OtherNames": "its weights do not fit the baseline's model (there is no net.0.weight, net.0.bias, net.2.weight, ...)",
    "Early": "it trains on 512 samples before the first step, and the baseline on 0",
}


def made(folder: Path, baseline: str) -> Trials:
    """The trials of a search among the callbacks of :data:`WHY`."""
    include = [f"tests.tune.tasks.{name}" for name in WHY]
    tuner = Tuner(baseline, target="val_loss", budget=30, include=include, out=folder / "out", threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_eff.tune.tuner.Places", Here)
        patch.setattr(Tuner, "_probes", lambda *args: {})
        look = tuner.look()
    return Trials(look.recipes, look.found, Here(), folder, target="val_loss", budget=30, seed=0, threads=1)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    folder = tmp_path_factory.mktemp("faithful")
    return made(folder, config(folder))


@pytest.mark.parametrize("name", WHY)
def test_what_a_callback_logs_is_what_the_baseline_logs_of_its_weights(trials: Trials, name: str) -> None:
    choices = Choices(techniques={f"tests.tune.tasks.{name}": {}})
    if WHY[name] is None:
        assert trials._unfaithful(choices) is None and trials._unfaithful(choices) is None
    else:
        with pytest.raises(Incomparable) as raised:
            trials._rehearsed(choices)
        assert str(WHY[name]) in str(raised.value)
    assert not list(trials.folder.glob("rehearsals/*.pt"))


def test_validation_data_that_are_drawn_anew_are_the_same_draws_in_both(tmp_path: Path) -> None:
    """Such as masked tokens that a collator draws."""
    file = Path(config(tmp_path))
    file.write_text(file.read_text().replace("tasks.Table", "tasks.NoisyTable"))
    noisy = made(tmp_path, str(file))
    for name in ("Neutral", "Averaged"):
        assert noisy._unfaithful(Choices(techniques={f"tests.tune.tasks.{name}": {}})) is None, name
    assert MEASURED in str(noisy._unfaithful(Choices(techniques={"tests.tune.tasks.ScaledLog": {}})))


def test_a_module_of_the_other_package_is_looked_at_and_tried(tmp_path: Path) -> None:
    """Its trials run under pytorch_lightning's Trainer, and the callbacks of the search act there."""
    file = Path(config(tmp_path))
    file.write_text(file.read_text().replace("tests.tune.tasks.", "tests.pl.tasks."))
    tuner = Tuner(str(file), target="val_loss", budget=30, include=["Lookahead"], out=tmp_path / "out", threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_eff.tune.tuner.Places", Here)
        look = tuner.look()
    assert set(look.space.techniques) == {"Lookahead"} and look.found.base_rate == pytest.approx(3e-3)
    trials = Trials(look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=30, seed=0, threads=1)  # pyright: ignore[reportArgumentType]
    assert trials._unfaithful(Choices(techniques={"Lookahead": {}})) is None


def test_of_what_crashes_alone_nothing_is_known(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the baseline crashes with its weights; trials side by side keep these in files of their own."""
    own = {"status": "finished", "ahead": 0, "metrics": {"val_loss": 1.0}}
    crashed = {"status": "crashed", "error": "MemoryError: out of memory"}
    monkeypatch.setattr(trials, "_faithful", set())
    neutral = "tests.tune.tasks.Neutral"
    files: set[str] = set()
    for stack in ({neutral: {}}, {neutral: {}, "tests.tune.tasks.Averaged": {}}):
        for records in ([crashed], [own, crashed]):
            left = list(records) * len(stack)

            def done(choices: Choices, pace: Any, *rest: Any, left: list[Any] = left) -> Any:
                files.update([pace.keep] if pace.keep else [])
                return left.pop(0)

            monkeypatch.setattr(trials, "_done", done)
            assert trials._unfaithful(Choices(techniques=stack)) is None and not trials._faithful
    assert len(files) == 3, "one of each callback of each stack"


def test_a_callback_is_asked_once_of_each_setting_and_named_where_it_stands_among_others(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Choices] = []

    def alone(choices: Choices, cls: Any, name: str) -> tuple[bool, str | None]:
        asked.append(choices)
        return (False, "it lies") if cls.__name__ == "Averaged" else (True, None)

    monkeypatch.setattr(trials, "_alone", alone)
    monkeypatch.setattr(trials, "_faithful", set())
    neutral, averaged = "tests.tune.tasks.Neutral", "tests.tune.tasks.Averaged"
    for settings in ({"a": 1}, {"a": 2}, {"a": 1}):
        assert trials._unfaithful(Choices(techniques={neutral: settings})) is None
    assert asked == [Choices(techniques={neutral: {"a": 1}}), Choices(techniques={neutral: {"a": 2}})]
    stack = {neutral: {"a": 1}, averaged: {}}
    assert trials._unfaithful(Choices({"batch": 8}, stack)) == f"{averaged}: it lies"
    assert asked[2:] == [Choices({"batch": 8}, {averaged: {}})]


def test_the_arithmetic_of_a_run_may_be_another() -> None:
    assert mismeasures(1.0, 1.0) is None and mismeasures(0.995, 1.0) is None and mismeasures(0.0, 0.0) is None
    assert "0.5, and the target of the same weights in the baseline is 1" in str(mismeasures(0.5, 1.0))
    assert early(16, 16) is None and early(0, 16) is None and "trains on 48 samples" in str(early(48, 16))


@pytest.mark.parametrize("name", ["fast_dev_run", "barebones"])
def test_a_trainer_that_only_plays_is_told_so(name: str, tmp_path: Path) -> None:
    file = Path(config(tmp_path))
    file.write_text(file.read_text().replace("devices: 1", f"devices: 1, {name}: true"))
    tuner = Tuner(file, target="val_loss", budget=30, out=tmp_path / "out")
    with pytest.raises(Incomparable, match=rf"Got a Trainer with {name}=True; .* Remove {name}\."):
        tuner.look()
