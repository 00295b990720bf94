"""Two results side by side: refusals, and warnings about figures that cannot be compared."""

import pytest

from lightning_eff.bench.reports.compare import compare
from tests.bench import synthetic


def pair(**options):
    return synthetic.everything(), synthetic.everything(**options)


def flat(text):
    return " ".join(text.split())


def test_the_same_twice_differs_in_nothing():
    text = compare(*pair(), width=160)
    assert "Plan, configs, machine and versions are the same." in text
    assert "!" not in text
    row = next(line for line in text.splitlines() if line.startswith("stacking"))
    assert row.split().count("faster") == 2
    assert row.count("1.41 [1.27, 1.57]") == 2


@pytest.mark.parametrize("width", [80, 100, 160])
def test_it_fits(width):
    a, b = pair(budget=30.0)
    b["machine"]["cpu"] = "Another CPU with a long name, " * 6
    assert max(map(len, compare(a, b, width).splitlines())) <= width


def test_another_metric_is_refused():
    a, b = pair()
    b["plan"]["target"] = "val_acc"
    with pytest.raises(ValueError, match="A's target is 'val_loss', B's is 'val_acc'"):
        compare(a, b)
    a, b = pair(mode="max")
    with pytest.raises(ValueError, match="A's mode is 'min', B's is 'max'"):
        compare(a, b)


def test_an_unknown_schema_is_refused():
    a, b = pair()
    b["schema"] = "lightning_eff.bench/2"
    with pytest.raises(ValueError, match=r"Results B cannot be read: schema: got 'lightning_eff.bench/2'"):
        compare(a, b)


def test_another_budget_and_clock_are_warned_of():
    text = flat(compare(*pair(budget=30.0, clock="wall")))
    assert "! The budgets differ (60 s and 30 s). Final metrics cannot be compared" in text
    assert "! The clocks differ (reference and wall)" in text
    assert "- plan, budget.seconds: 60.0 | 30.0" in text


def test_machines_matter_to_the_wall_clock_alone():
    a, b = pair()
    b["machine"]["cpu"] = "Real CPU"
    text = flat(compare(a, b))
    assert "Final metrics and speed-ups can still be compared" in text
    assert "- machine, cpu: Imaginary CPU 9000 | Real CPU" in text
    a["plan"]["budget"]["clock"] = b["plan"]["budget"]["clock"] = "wall"
    text = flat(compare(a, b))
    assert "a wall-clock second is another budget on another machine" in text
    assert "can still be compared" not in text


def test_arms_versions_and_configs_are_told_apart():
    a, b = pair()
    b["machine"]["torch"] = "2.14.0"
    b["plan"]["arms"][3]["name"] = "sharp"
    b["plan"]["arms"][0]["configs"] = ["other.yaml"]
    b["calibration"]["sharp"] = b["calibration"].pop("sharpness")
    for run in b["runs"]:
        run["arm"] = "sharp" if run["arm"] == "sharpness" else run["arm"]
    text = flat(compare(a, b))
    assert "Only in A: sharpness." in text
    assert "Only in B: sharp." in text
    assert "- machine, torch: 2.13.0 | 2.14.0" in text
    assert "! The baselines differ" in text
    assert "- arm baseline, configs: configs/baseline.yaml | other.yaml" in text


def test_what_is_unfinished_is_told():
    a, b = pair()
    b["finished"] = None
    assert "! B is not finished." in compare(a, b)


def test_benches_that_share_no_arm_are_told_apart():
    a, b = synthetic.results({"baseline": 1.0, "a": 1.1}), synthetic.results({"plain": 1.0, "b": 1.1})
    text = flat(compare(a, b))
    assert "Only in A: baseline, a." in text and "Only in B: plain, b." in text
