"""results.json: round trips, atomic writing, and messages about errors."""

import copy
import json
import math
import os

import pytest

from lightning_eff.bench.results import load, save, validate
from tests.bench import synthetic


def put(results, path, value):
    """Set a nested entry, or take it away where ``value`` is ``...``."""
    *way, last = path
    for key in way:
        results = results[key]
    if value is ...:
        del results[last]
    else:
        results[last] = value


def test_what_is_saved_comes_back(tmp_path):
    made = synthetic.results({"baseline": 1.0, "a": 1.2})
    assert save(made, tmp_path / "out") == tmp_path / "out" / "results.json"
    assert load(tmp_path / "out") == made
    assert load(tmp_path / "out" / "results.json") == made
    assert os.listdir(tmp_path / "out") == ["results.json"]


def test_what_is_not_finite_becomes_null(tmp_path):
    made = synthetic.everything()
    assert math.isnan(made["runs"][6]["points"][-1]["metric"])
    text = save(made, tmp_path).read_text(encoding="utf-8")
    assert "NaN" not in text
    assert load(tmp_path)["runs"][6]["points"][-1]["metric"] is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    made = synthetic.results({"baseline": 1.0})
    save(made, tmp_path)

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr("lightning_eff.bench.results.os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        save(made | {"title": "new"}, tmp_path)
    assert load(tmp_path)["title"] == "Synthetic results"
    assert os.listdir(tmp_path) == ["results.json"]


def test_wrong_results_are_not_written(tmp_path):
    made = synthetic.results({"baseline": 1.0})
    made["runs"][0]["seed"] = "one"
    with pytest.raises(ValueError, match="seed"):
        save(made, tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_is_no_results_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"results\.json: no such file. Give the folder of a bench"):
        load(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"schema": "lightning_eff.bench/9"}))
    with pytest.raises(ValueError, match=r"got 'lightning_eff.bench/9', but this version of lightning_eff reads"):
        load(tmp_path)


def test_fields_of_a_later_hand_are_left_alone(tmp_path):
    made = synthetic.everything()
    made["more"] = made["runs"][0]["more"] = made["plan"]["more"] = 1
    save(made, tmp_path)
    kept = load(tmp_path)
    assert kept["more"] == kept["runs"][0]["more"] == kept["plan"]["more"] == 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["machine"], ..., "results.machine: missing; expected an object"),
        (["machine", "cores"], 2.5, "machine.cores: got 2.5; expected a whole number"),
        (["machine", "git"], {"revision": "0"}, "machine.git.dirty: missing; expected true or false"),
        (["plan", "mode"], "least", "plan.mode: got 'least'; expected one of 'min', 'max'"),
        (["plan", "budget", "seconds"], 0, "plan.budget.seconds: got 0; expected > 0"),
        (["plan", "seeds"], [1, 1], "expected at least one, each once"),
        (["plan", "arms", 0, "kind"], "recipe", "expected the first arm, and no other, to be 'baseline'"),
        (["plan", "arms", 1, "factor"], 2.0, "got 2.0 for a recipe"),
        (["plan", "arms", 1, "name"], "baseline", "expected each once"),
        (["plan", "arms", 2, "of"], "nobody", "of the control 'two layers throughout': got 'nobody'"),
        (["calibration", "nobody"], {}, "calibration: got 'nobody'; expected a arm of the plan"),
        (["calibration", "stacking", "rates", 1], [3.0], r"expected \[baseline, arm\] in samples/s"),
        (
            ["calibration", "stacking"],
            {**synthetic.calibration(1.0, True), "rates": []},
            "expected some, because same_training",
        ),
        (["runs", 1, "arm"], "nobody", r"runs\[1\].arm: got 'nobody'"),
        (["runs", 1, "seed"], 9, r"runs\[1\].seed: got 9; expected a seed of the plan: 1, 2, 3"),
        (["runs", 8, "seed"], 1, "occurs twice"),
        (["runs", 1, "status"], "lost", "expected one of 'finished', 'crashed', 'diverged'"),
        (["runs", 1, "points"], [], "got none in a finished run"),
        (["runs", 1, "points", 1, "seconds"], 1.0, "got 1.0 after 6.0; expected a rise"),
        (["runs", 1, "points", 1, "metric"], "low", r"points\[1\].metric: got 'low'; expected a number or null"),
        (["runs", 1, "seconds"], math.inf, "seconds: got inf; expected a finite number"),
        (["runs", 1, "memory", 3], [1.0], r"memory\[3\]: got \[1.0\]; expected \[seconds, value\]"),
        (["runs", 1, "energy_joules"], "much", "energy_joules: got 'much'; expected a finite number or null"),
        (["runs", 1, "steps"], True, "steps: got True; expected a whole number"),
    ],
)
def test_what_is_wrong_is_named(path, value, message):
    made = copy.deepcopy(synthetic.everything())
    validate(made)
    put(made, path, value)
    with pytest.raises(ValueError, match=message):
        validate(made)
