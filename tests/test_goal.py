"""The share of its time in which a recipe ends where the baseline ends, against losses made from a known one."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence
from benchmarks.goal import as_good, exact, gathered, lines, seconds_to, share

SPREAD = {1: -0.01, 2: 0.0, 3: 0.01}


def loss(seconds: float, seed: int) -> float:
    return 2.0 - 0.2 * math.log(seconds) + SPREAD[seed]


def bench(
    first: str, budget: float, factors: list[float], recipes: dict[str, float], rates: Any = None
) -> dict[str, Any]:
    """A bench whose arms are as far on as the baseline is after so many times the seconds."""
    arms = [{"name": first, "kind": "baseline", "factor": 1.0}]
    arms += [{"name": name, "kind": "recipe", "factor": 1.0} for name in recipes if name != first]
    arms += [{"name": f"{first} × {f}", "kind": "ladder", "factor": f} for f in factors]
    speeds = {"baseline": 1.0, **recipes}
    runs = []
    for arm in arms:
        speed = speeds[arm["name"].split(" × ")[0]]
        for seed in SPREAD:
            point = {"seconds": budget, "metric": loss(speed * budget * arm["factor"], seed)}
            runs.append({"arm": arm["name"], "seed": seed, "status": "finished", "points": [point]})
    calibration = {name: {"rates": rates} for name in recipes} if rates else {}
    return {"plan": {"budget": {"seconds": budget}, "arms": arms}, "runs": runs, "calibration": calibration}


def test_the_share_of_a_known_speed_is_found_between_two_budgets() -> None:
    """Losses are lines over log(seconds) here, so what is found between budgets is right to rounding."""
    arms = gathered([bench("baseline", 60, [5], {"fast": 2.5}), bench("fast", 12, [2, 10], {"fast": 2.5})])
    assert sorted(arms["baseline"].finals) == [60, 300] and sorted(arms["fast"].finals) == [12, 24, 60, 120]
    for budget in (60, 300):
        found = share(arms["fast"], arms["baseline"], budget)
        assert found is not None and found.seeds == 3 and not (found.below or found.above)
        assert found.estimate == pytest.approx(0.4) and found.low == pytest.approx(0.4) == found.high
    assert share(arms["fast"], arms["baseline"], 90) is None, "the baseline was not run there"
    for budget in (24, 120):
        found = as_good(arms["fast"], arms["baseline"], budget)
        assert found is not None and found.seeds == 3 and found.estimate == pytest.approx(0.4)
    bounds = [as_good(arms["fast"], arms["baseline"], budget) for budget in (12, 240)]
    assert bounds[0] is not None and (bounds[0].above, bounds[0].most) == (3, 0.2) and bounds[1] is None


def test_a_seed_without_the_budgets_that_would_tell_does_not_count() -> None:
    """One with fewer budgets than others counts where they enclose the target, and is no bound where they do not."""
    arms = gathered([bench("baseline", 60, [5], {}), bench("fast", 12, [2, 10], {"fast": 2.5})])
    for seconds in (12, 24):
        del arms["fast"].finals[seconds][3]  # which has 120 s alone
    for budget, seeds in ((60, 2), (300, 3)):
        found = share(arms["fast"], arms["baseline"], budget)
        assert found is not None and found.seeds == seeds and not (found.below or found.above)
        assert found.estimate == pytest.approx(0.4)


def test_a_seed_counts_where_the_others_budgets_would_not_have_told_either() -> None:
    """It is below the least of all, or above the most, whatever lies between."""
    arms = gathered([bench("baseline", 60, [5, 0.1], {}), bench("fast", 12, [2, 10], {"fast": 2.5})])
    del arms["fast"].finals[24][3]
    for budget, off in ((6, (3, 0)), (300, (0, 0))):
        found = share(arms["fast"], arms["baseline"], budget)
        assert found is not None and (found.seeds, (found.below, found.above)) == (3, off)


def test_where_some_seeds_lie_off_the_budgets_their_number_is_told_beside_the_mean() -> None:
    runs = bench("fast", 24, [2], {"fast": 2.5})
    for run in runs["runs"]:
        run["points"][0]["metric"] -= 0.03 * (run["seed"] == 1)
    arms = gathered([bench("baseline", 66, [], {}), runs])
    found = share(arms["fast"], arms["baseline"], 66)
    assert found is not None and (found.below, found.low) == (1, None) and found.estimate is not None
    assert found.estimate == pytest.approx(0.4 * math.exp(-0.01 / 0.2))
    assert f"{found.estimate:.2f} (3 seeds, 1 below 0.36)" in lines(arms, {"fast": "it"}, 60)[2]


def test_a_bound_is_of_the_budgets_that_the_seeds_beyond_it_ran() -> None:
    """One that ran longer than the others, since these had arrived, is above its own longest budget and not above theirs."""
    arms = gathered([bench("baseline", 60, [5], {}), bench("fast", 12, [2.5, 10], {"fast": 2.5})])
    fast = arms["fast"].finals
    for seed in (1, 2):
        del fast[120][seed]
    for seconds in fast:
        fast[seconds][3] += 1
    found = share(arms["fast"], arms["baseline"], 60)
    assert found is not None and (found.seeds, found.above, found.most) == (3, 1, 2.0)
    for seconds in fast:
        fast[seconds][3] -= 2
    fast[6] = {3: fast[12][3]}
    found = share(arms["fast"], arms["baseline"], 60)
    assert found is not None and (found.seeds, found.below, found.least) == (3, 1, 0.1)


def test_what_lies_off_the_budgets_is_a_bound() -> None:
    arms = gathered([bench("baseline", 60, [5], {"fast": 9.0, "slow": 0.5})])
    (fast, slow) = (share(arms[name], arms["baseline"], 60) for name in ("fast", "slow"))
    assert fast is not None and slow is not None
    assert (fast.estimate, fast.below, fast.above, fast.least) == (None, 3, 0, 1.0)
    assert (slow.estimate, slow.below, slow.above, slow.most) == (None, 0, 3, 1.0)
    told = lines(arms, {"fast": "a recipe"}, 60)
    assert "| a recipe | below 1.00 (3 seeds) | below 0.20 (3 seeds) |" in told
    assert seconds_to({10: 3.0, 20: 2.0, 40: 2.5}, 2.2)[0] == pytest.approx(10 * 2**0.8)
    assert seconds_to({10: 3.0, 20: 2.0}, 3.0) == (10, None)


def test_the_error_of_a_price_widens_the_interval() -> None:
    rates = [[1.0, 2.0], [1.0, 2.2], [1.0, 1.8]]
    arms = gathered([bench("baseline", 60, [], {"fast": 2.0}, rates), bench("fast", 20, [2], {"fast": 2.0})])
    found = share(arms["fast"], arms["baseline"], 60)
    assert found is not None and found.estimate == pytest.approx(0.5)
    assert found.low is not None and found.high is not None and found.low < 0.42 and found.high > 0.58
    price = arms["fast"].price
    assert price is not None and price.estimate == pytest.approx((2.0 * 2.2 * 1.8) ** (-1 / 3)) and price.n == 3
    assert (
        f"cost of its step, {price.estimate:.2f} [{price.low:.2f}, {price.high:.2f}]," in exact("fast", arms["fast"])[0]
    )
    assert exact("baseline", arms["baseline"]) == []


def test_one_seed_has_no_interval_and_says_so() -> None:
    one = bench("baseline", 60, [5], {"fast": 2.5})
    one["runs"] = [run for run in one["runs"] if run["seed"] == 2 or not run["arm"].endswith("5")]
    arms = gathered([one, bench("fast", 12, [2, 10], {"fast": 2.5})])
    found = share(arms["fast"], arms["baseline"], 300)
    assert found is not None and (found.low, found.seeds) == (None, 1) and found.estimate == pytest.approx(0.4)
    told = lines(arms, {"fast": "a recipe", "absent": "not run"}, 60)
    assert "| a recipe | 0.40 [0.40, 0.40] (3 seeds) | 0.40 (1 seed) |" in told
    assert not any("not run" in line for line in told)


def test_baselines_that_end_otherwise_are_refused() -> None:
    other = bench("baseline", 60, [2], {})
    other["runs"][0]["points"][0]["metric"] += 1e-3
    with pytest.raises(ValueError, match=r"the baseline of seed 1 at 60 s ends at .* in one bench and at"):
        gathered([bench("baseline", 60, [5], {}), other])


def test_of_a_baseline_that_another_processor_ran_again_the_first_run_stays() -> None:
    """It rounds differently: a quarter of the deviation over seeds is nobody's fault, which is 0.01 here."""
    first, other = bench("baseline", 60, [5], {}), bench("baseline", 60, [], {"fast": 2.5})
    other["runs"] = [{**run, "cpu": "another"} for run in other["runs"] if run["seed"] == 2]
    own = other["runs"][0]["points"][0]["metric"]
    other["runs"].append({**other["runs"][0], "seed": 4})
    other["runs"][0]["points"] = [{"seconds": 60, "metric": own + 0.0024}]
    for benches in ([first, other], [other, first]):
        finals = gathered(benches)["baseline"].finals[60]
        assert finals == {**{seed: loss(60, seed) for seed in SPREAD}, 4: own}
    other["runs"][0]["points"] = [{"seconds": 60, "metric": own + 0.0026}]
    with pytest.raises(ValueError, match=r"the baseline of seed 2 at 60 s ends at .* in one bench and at"):
        gathered([first, other])


def test_a_ladder_takes_prices_from_a_bench_of_its_task_that_has_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, arms in (("bench_a", ["baseline"]), ("goal_ab", ["stack"]), ("compute_a", ["stack", "baseline"])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"calibration": {arm: {} for arm in arms}}))
    calls: list[Any] = []
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence, "compare", lambda *given, part: calls.append((given[1], Path(given[-1][12:]).stem)))
    for of, budget in ((None, "60rs"), (None, "300rs"), ("stack", "24rs")):
        evidence.ladder("a", argparse.Namespace(of=of, budget=budget, seeds="3", ladder="0.5"))
    assert calls == [("ladder_a", "bench_a"), ("ladder_a_300", "bench_a"), ("ladder_a_24_stack", "compute_a")]
    with pytest.raises(SystemExit, match=r"no bench of a in .* has prices of other; run one first"):
        evidence.ladder("a", argparse.Namespace(of="other", budget="60rs", seeds="3", ladder="0.5"))
