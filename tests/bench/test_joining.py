"""Benches that were run apart are one where their runs are the same, and are refused elsewhere."""

import copy

import pytest

from benchmarks.joining import joined, with_seeds
from lightning_eff.bench.reports.statistics import summarize
from tests.bench import synthetic


def part(whole: dict, *names: str) -> dict:
    """The bench of the baseline and these arms alone."""
    made = copy.deepcopy(whole)
    keep = {"baseline", *names}
    made["plan"]["arms"] = [arm for arm in made["plan"]["arms"] if arm["name"] in keep]
    made["runs"] = [run for run in made["runs"] if run["arm"] in keep]
    made["calibration"] = {name: c for name, c in made["calibration"].items() if name in keep}
    made["plan"]["tuned"] = [name for name in ("baseline", "stacking", "sharpness") if name in keep]
    return made


def test_parts_are_the_whole() -> None:
    whole = synthetic.everything()
    names = [arm["name"] for arm in whole["plan"]["arms"][1:]]
    found = joined(joined(part(whole, *names[:3]), part(whole, *names[3:5])), part(whole, *names[5:]))
    assert found["plan"].pop("tuned") == ["baseline", "stacking", "sharpness"]
    whole["plan"].pop("tuned", None)
    assert found["plan"] == whole["plan"] and found["calibration"] == whole["calibration"]
    assert found["runs"] == whole["runs"] and summarize(found) == summarize(whole)
    assert joined(whole, None) is whole


def test_an_arm_that_was_run_again_takes_the_place_of_the_old_one() -> None:
    whole = synthetic.everything()
    later = part(whole, "sharpness")
    for run in later["runs"]:
        if run["arm"] == "sharpness":
            run["points"][-1]["metric"] += 0.5
    found = joined(whole, later)
    worse = summarize(found)["sharpness"]["final"]["mean"] - summarize(whole)["sharpness"]["final"]["mean"]
    assert worse == pytest.approx(0.5) and len(found["runs"]) == len(whole["runs"])


def test_an_arm_that_took_the_old_prices_keeps_the_rates_that_they_were_told_from() -> None:
    whole = synthetic.everything()
    later = part(whole, "sharpness")
    own = [[1.0, 1.0 + 0.1 * i] for i in range(2)]  # of two rehearsals on a busy machine
    later["calibration"]["sharpness"]["rates"] = own
    kept = joined(whole, later)["calibration"]["sharpness"]["rates"]
    assert kept == whole["calibration"]["sharpness"]["rates"] != own
    later["calibration"]["sharpness"]["prices"][0]["seconds"] *= 1.01  # prices that it measured itself
    assert joined(whole, later)["calibration"]["sharpness"]["rates"] == own


def test_other_baselines_and_budgets_are_refused() -> None:
    whole = synthetic.everything()
    other = part(whole, "sharpness")
    other["runs"][0]["points"][-1]["metric"] += 1e-9
    with pytest.raises(ValueError, match=r"the baseline ends at .* expected the same runs"):
        joined(whole, other)
    longer = part(whole, "sharpness")
    longer["plan"]["budget"] = {"seconds": 61.0, "clock": "reference"}
    with pytest.raises(ValueError, match=r"benches with budget .* cannot be joined"):
        joined(whole, longer)


def seeded(whole: dict, *seeds: int) -> dict:
    """The bench of these seeds alone, with rates of its own."""
    made = copy.deepcopy(whole)
    made["plan"]["seeds"] = list(seeds)
    made["runs"] = [run for run in made["runs"] if run["seed"] in seeds]
    return made


def test_seeds_are_the_whole() -> None:
    whole = synthetic.everything()
    first, *others = whole["plan"]["seeds"]
    later = seeded(whole, *others)
    later["calibration"]["sharpness"]["rates"] = [[1.0, 0.1], [1.0, 2.0]]  # of fewer rehearsals: they do not count
    found = with_seeds(seeded(whole, first), later)
    assert found == whole and summarize(found) == summarize(whole)


def test_another_comment_is_no_other_config() -> None:
    whole = synthetic.everything()
    first, *others = whole["plan"]["seeds"]
    for bench, text in (
        (earlier := seeded(whole, first), "# as tried\na: 1"),
        (later := seeded(whole, *others), "a: 1"),
    ):
        (arm,) = (arm for arm in bench["plan"]["arms"] if arm["name"] == "sharpness")
        arm["configs"] = [text]
    assert len(with_seeds(earlier, later)["plan"]["seeds"]) == len(whole["plan"]["seeds"])
    (arm,) = (arm for arm in later["plan"]["arms"] if arm["name"] == "sharpness")
    arm["configs"] = ["a: 2"]
    with pytest.raises(ValueError, match="sharpness differs between the benches"):
        with_seeds(earlier, later)


def test_another_description_is_no_other_arm() -> None:
    """Its words may change between the benches."""
    whole = synthetic.everything()
    first, *others = whole["plan"]["seeds"]
    later = seeded(whole, *others)
    later["plan"]["arms"][0]["description"] = "the same in other words"
    assert with_seeds(seeded(whole, first), later)["plan"]["arms"] == whole["plan"]["arms"]


def test_an_arm_may_have_more_seeds_than_others_and_an_overlap_counts_once() -> None:
    whole = synthetic.everything()
    first, second, *_ = whole["plan"]["seeds"]
    few, later = seeded(whole, first, second), part(whole, "sharpness")
    found = with_seeds(few, later)  # whose seeds are all of them
    summary = summarize(found)
    told = summarize(later)["sharpness"]
    assert all(summary["sharpness"][key] == told[key] for key in ("final", "difference", "speedup", "verdict"))
    assert len(summary["stacking"]["final"]["values"]) == 2 < len(summary["sharpness"]["final"]["values"])
    assert len({(run["arm"], run["seed"]) for run in found["runs"]}) == len(found["runs"])


def test_an_arm_that_only_the_later_bench_has_comes_along() -> None:
    whole = synthetic.everything()
    first, *others = whole["plan"]["seeds"]
    found = with_seeds(part(seeded(whole, first), "stacking"), seeded(part(whole, "sharpness"), *others))
    assert [arm["name"] for arm in found["plan"]["arms"]] == ["baseline", "stacking", "sharpness"]
    assert found["calibration"]["sharpness"] == whole["calibration"]["sharpness"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("price", r"sharpness has other prices in the other bench"),
        ("kinds", r"sharpness has other prices in the other bench"),
        ("end", r"sharpness ends differently in the two benches: \{1: "),
        ("config", r"sharpness differs between the benches"),
        ("budget", r"benches with budget .* cannot be joined"),
    ],
)
def test_seeds_of_other_benches_are_refused(what: str, message: str) -> None:
    whole = synthetic.everything()
    later = copy.deepcopy(whole)
    if what == "price":
        later["calibration"]["sharpness"]["prices"][0]["seconds"] *= 1.01
    elif what == "kinds":
        for price in later["calibration"]["sharpness"]["prices"]:
            price["kind"] += " and forward"
    elif what == "end":
        (run,) = (run for run in later["runs"] if run["arm"] == "sharpness" and run["seed"] == 1)
        run["points"][-1]["metric"] += 1e-9
    elif what == "config":
        (arm,) = (arm for arm in later["plan"]["arms"] if arm["name"] == "sharpness")
        arm["configs"] = ["another"]
    else:
        later["plan"]["budget"] = {"seconds": 61.0, "clock": "reference"}
    with pytest.raises(ValueError, match=message):
        with_seeds(whole, later)


def test_a_kind_of_step_that_hangs_on_the_seed_is_no_other_price() -> None:
    """Such as a first step after a search of more forward passes: only one bench met it."""
    whole = synthetic.everything()
    first, *others = whole["plan"]["seeds"]
    later = seeded(copy.deepcopy(whole), *others)
    later["calibration"]["sharpness"]["prices"][1]["kind"] = "step 64 after 42 forward"
    found = with_seeds(seeded(whole, first), later)
    assert len([run for run in found["runs"] if run["arm"] == "sharpness"]) == len(whole["plan"]["seeds"])
    assert found["calibration"]["sharpness"] == whole["calibration"]["sharpness"]


def test_on_another_processor_runs_of_both_may_differ_by_rounding_and_those_that_come_along_say_so() -> None:
    whole = synthetic.everything()
    first, second, *others = whole["plan"]["seeds"]
    earlier, later = seeded(whole, first, second), seeded(whole, second, *others)
    later["machine"] = {**later["machine"], "cpu": "another"}
    ends = [
        run["points"][-1]["metric"]
        for seed in (first, second)
        for run in earlier["runs"]
        if run["arm"] == "sharpness" and run["seed"] == seed
    ]
    (run,) = (run for run in later["runs"] if run["arm"] == "sharpness" and run["seed"] == second)
    spread = abs(ends[1] - ends[0]) / 2**0.5  # the standard deviation of two
    run["points"][-1]["metric"] = ends[1] + 0.24 * spread
    found = with_seeds(earlier, later)
    assert {run["seed"]: run.get("cpu") for run in found["runs"]} == {
        first: None,
        second: None,
        **dict.fromkeys(others, "another"),
    }
    run["points"][-1]["metric"] = ends[1] + 0.26 * spread
    with pytest.raises(ValueError, match="sharpness ends differently in the two benches"):
        with_seeds(earlier, later)
