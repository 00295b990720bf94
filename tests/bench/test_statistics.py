"""The bench's statistics: coverage by simulation, figures against hand-made ones, and no verdict beyond its interval."""

import json
import math
from random import Random

import pytest

from lightning_eff.bench.reports import findings, statistics
from lightning_eff.bench.reports.intervals import Interval, paired_interval, paired_ratio, t_quantile
from lightning_eff.bench.reports.statistics import equivalent_seconds, speed_up, summarize, time_to
from tests.bench import synthetic


def points(*pairs):
    return [{"seconds": seconds, "metric": metric} for seconds, metric in pairs]


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [  # a printed table of Student's t
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.975, 4, 2.77645),
        (0.975, 9, 2.26216),
        (0.95, 10, 1.81246),
        (0.995, 30, 2.75000),
        (0.025, 2, -4.30265),
    ],
)
def test_t_quantile_is_the_tables(probability, degrees, expected):
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("n", [3, 5, 10])
def test_interval_covers_the_mean_of_normal_data(n):
    """95 % of 4000 draws, to within four standard errors of that count."""
    random, rounds = Random(n), 4000
    covered = sum(not paired_interval([random.gauss(0.3, 1) for _ in range(n)]).excludes(0.3) for _ in range(rounds))
    assert covered / rounds == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / rounds))


@pytest.mark.parametrize("n", [3, 6, 8])
def test_wild_values_widen_the_interval_rather_than_mislead_it(n):
    """One round in ten is eight times as far off, as on a machine that others use: the mean is still covered."""
    random, rounds = Random(n), 4000
    drawn = [[random.gauss(0.3, 8 if random.random() < 0.1 else 1) for _ in range(n)] for _ in range(rounds)]
    assert sum(not paired_interval(values).excludes(0.3) for values in drawn) / rounds >= 0.945


def test_interval_is_students():
    """By hand: mean 3, s = √7, so ± 4.302653 · √(7 / 3); at 80 % the quantile is 1.885618."""
    interval = paired_interval([1.0, 2.0, 6.0])
    assert (interval.estimate, interval.n) == (3, 3)
    assert interval.low == pytest.approx(3 - 4.302653 * math.sqrt(7 / 3), rel=1e-6)
    assert interval.high == pytest.approx(3 + 4.302653 * math.sqrt(7 / 3), rel=1e-6)
    assert paired_interval([1.0, 2.0, 6.0], level=0.8).high == pytest.approx(3 + 1.885618 * math.sqrt(7 / 3), rel=1e-6)


def test_fewer_than_two_give_no_interval():
    assert paired_interval([]) is None
    assert paired_interval([1.0]) is None
    assert paired_ratio([(1.0, 2.0)]) is None


def test_ratio_is_the_geometric_mean_and_swaps_to_its_reciprocal():
    pairs = [(1.0, 2.0), (1.0, 8.0), (3.0, 3.0)]
    there, back = paired_ratio(pairs), paired_ratio([(b, a) for a, b in pairs])
    assert there.estimate == pytest.approx(16 ** (1 / 3))
    assert (back.low, back.high) == (pytest.approx(1 / there.high), pytest.approx(1 / there.low))


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match="got nan"):
        paired_interval([1.0, math.nan])
    with pytest.raises(ValueError, match=r"got \(0.0, 1.0\)"):
        paired_ratio([(0.0, 1.0), (1.0, 1.0)])


def test_time_to_is_the_first_crossing():
    curve = points((10, 4.0), (20, 2.0), (30, 3.0), (40, 1.0))
    assert time_to(curve, 3.0, "min") == 15
    assert time_to(curve, 2.0, "min") == 20
    assert time_to(curve, 1.5, "min") == 37.5
    assert time_to(curve, 5.0, "min") == 10  # an upper bound
    assert time_to(curve, 0.5, "min") is None
    assert time_to(points((10, 0.2), (20, None), (30, 0.6)), 0.5, "max") == 25
    with pytest.raises(ValueError, match="mode='lowest'"):
        time_to(curve, 1.0, "lowest")


def test_speed_up_is_symmetric_and_defined_for_losers():
    slow, fast = points((10, 4.0), (20, 3.0), (30, 2.0)), points((10, 2.5), (20, 1.5), (30, 1.0))
    assert speed_up(slow, fast, "min") == 30 / 15
    assert speed_up(fast, slow, "min") == 15 / 30
    assert speed_up(fast, points((10, 9.0), (30, 5.0)), "min") == 10 / 30  # the first evaluation beats the end
    assert speed_up(slow, slow, "min") == 1


def test_equal_ends_are_no_speed_up_whatever_the_way_there():
    bumpy = points((10, 1.0), (20, 3.0), (30, 2.0))
    assert speed_up(bumpy, points((10, 4.0), (20, 3.0), (30, 2.0)), "min") == 1


def test_ladder_is_interpolated_in_the_logarithm_and_not_beyond():
    ladder = [(60.0, 1.6), (15.0, 2.0), (30.0, 1.8)]
    seconds, bound = equivalent_seconds(ladder, 1.7, "min")
    assert seconds == pytest.approx(math.sqrt(30 * 60))
    assert bound is None
    assert equivalent_seconds(ladder, 1.5, "min") == (None, "beyond 60 s")
    assert equivalent_seconds(ladder, 2.1, "min") == (None, "below 15 s")
    assert equivalent_seconds([(15.0, 2.0)], 2.0, "min") == (None, None)


def test_verdicts_of_one_of_each():
    summary = summarize(synthetic.everything())
    verdicts = {name: own["verdict"] for name, own in summary.items()}
    assert verdicts == {
        "baseline": "no verdict",
        "stacking": "faster",
        "two layers throughout": "faster",
        "sharpness": "slower",
        "cosine": "no measurable difference",
        "crashes once": "no measurable difference",
        "diverges": "failed",
        "baseline × 2": "no verdict",
    }
    assert summary["stacking"]["speedup"]["estimate"] == pytest.approx(1.4, rel=0.05)  # as planted
    assert summary["sharpness"]["speedup"]["estimate"] == pytest.approx(0.6, rel=0.05)
    assert summary["stacking"]["speedup_from"] == "metric"
    assert summary["stacking"]["memory"]["estimate"] == pytest.approx(652 / 620)
    assert summary["stacking"]["equivalent_seconds"] == pytest.approx(1.4 * 60, rel=0.1)
    assert summary["sharpness"]["equivalent_bound"] == "below 60 s"
    assert summary["sharpness"]["time_to_target"] == {"seconds": [None, None, None], "reached": 0}
    assert summary["sharpness"]["extra_share"] == pytest.approx(5 / 66, rel=0.02)
    assert summary["stacking"]["tokens_per_second"] == pytest.approx(240 * 1.4 * 128)
    assert "But its control, two layers throughout, is faster too" in summary["stacking"]["sentence"]


def test_summary_is_plain_json():
    summary = summarize(synthetic.everything())
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_failures_are_told_and_left_out():
    summary = summarize(synthetic.everything())
    once = summary["crashes once"]
    assert once["failed"] == [{"seed": 2, "status": "crashed", "error": "RuntimeError: out of memory <at step 700>"}]
    assert sorted(once["final"]["values"]) == ["1", "3"]
    assert "Failed runs do not count: 1 of 3 (seed 2 crashed)." in once["sentence"]
    assert "diverges failed on every seed" in summary["diverges"]["sentence"]


def test_a_run_that_ends_at_no_number_counts_as_diverged():
    made = synthetic.results({"baseline": 1.0, "a": 1.2})
    made["runs"][1]["points"][-1]["metric"] = math.nan
    own = summarize(made)["a"]
    assert own["failed"] == [{"seed": 1, "status": "diverged", "error": "its final metric is not a finite number"}]
    assert own["difference"]["n"] == 2


def test_one_common_seed_gives_no_verdict():
    made = synthetic.results({"baseline": 1.0, "a": 2.0})
    synthetic.fail(made, "baseline", 1, "crashed", "gone")
    synthetic.fail(made, "a", 2, "crashed", "gone")
    own = summarize(made)["a"]
    assert (own["verdict"], own["speedup"], own["difference"]) == ("no verdict", None, None)
    assert "no verdict" in own["sentence"]


def test_a_module_that_sets_its_own_seed_repeats_itself():
    """Three seeds that gave one run are no evidence of three, and their interval of no width proves nothing."""
    made = synthetic.results({"baseline": 1.0, "a": 2.0})
    assert summarize(made)["a"]["verdict"] == "faster" and summarize(made)["a"]["repeated"] == 0
    one = {run["arm"]: run for run in made["runs"] if run["seed"] == 1}
    made["runs"] = [{**one[run["arm"]], "seed": run["seed"]} for run in made["runs"]]
    own = summarize(made)["a"]
    assert (own["verdict"], own["difference"], own["repeated"]) == ("no verdict", None, 2)
    assert "because several seeds gave identical runs, loss by loss" in own["sentence"]


def test_same_training_is_judged_by_throughput_alone():
    made = synthetic.results({"baseline": 1.0, "a": 1.0}, noise=0.3)
    made["calibration"]["a"] = synthetic.calibration(1.1, same_training=True)
    own = summarize(made)["a"]
    assert (own["verdict"], own["speedup_from"]) == ("faster", "throughput")
    assert own["speedup"] == own["throughput"]
    assert own["speedup"]["estimate"] == pytest.approx(1.1, rel=0.02)
    assert own["speedup"]["n"] == 6
    made = synthetic.results({"baseline": 1.0, "b": 1.0}, noise=0.03)
    made["calibration"]["b"] = synthetic.calibration(1.0, same_training=True)
    own = summarize(made)["b"]
    assert (own["verdict"], own["speedup_from"]) == ("no measurable difference", "throughput")
    assert "no measurable difference: it trains bit for bit like the baseline" in own["sentence"]


def test_higher_can_be_better():
    summary = summarize(synthetic.results({"baseline": 1.0, "up": 1.4, "down": 0.6}, mode="max"))
    assert (summary["up"]["verdict"], summary["down"]["verdict"]) == ("faster", "slower")
    assert summary["up"]["difference"]["estimate"] > 0


def test_prices_that_miss_costs_are_told():
    made = synthetic.results({"baseline": 1.0, "a": 1.4})
    assert "Warning" not in summarize(made)["a"]["sentence"]
    for run in made["runs"]:
        if run["arm"] == "a":
            run["wall_seconds"] *= 1.25
    own = summarize(made)["a"]
    assert own["price_gap"] == pytest.approx(1.25, rel=0.03)
    assert "step costs are therefore too low" in own["sentence"]
    made["plan"]["budget"]["clock"] = "wall"
    assert "Warning" not in summarize(made)["a"]["sentence"]


def test_a_recipe_that_beats_its_control_is_told_so():
    arms = [synthetic.arm("baseline", "baseline"), synthetic.arm("a"), synthetic.arm("c", "control", of="a")]
    own = summarize(synthetic.results({"baseline": 1.0, "a": 1.8, "c": 1.1}, arms=arms))["a"]
    assert own["better_than_control"]["c"]["high"] < 0
    assert "It beats its control, c" in own["sentence"]


def test_nothing_is_called_faster_whose_interval_includes_no_gain():
    random, verdicts = Random(7), []
    for draw in range(80):
        gain, noise = math.exp(random.gauss(0, 0.15)), random.choice([0.005, 0.02, 0.06])
        made = synthetic.results(
            {f"baseline {draw}": 1.0, f"a {draw}": gain}, noise=noise, seeds=[1, 2, 3, 4][: 2 + draw % 3]
        )
        own = summarize(made)[f"a {draw}"]
        speedup, gap = own["speedup"], own["difference"]
        verdicts.append(own["verdict"])
        if own["verdict"] == "faster":
            assert speedup["low"] > 1
            assert gap["high"] < 0
        elif own["verdict"] == "slower":
            assert speedup["high"] < 1
            assert gap["low"] > 0
        else:
            assert speedup["low"] <= 1 <= speedup["high"] or gap["low"] <= 0 <= gap["high"]
        if own["verdict"] == "no measurable difference":
            assert speedup["low"] <= 1 <= speedup["high"] and gap["low"] <= 0 <= gap["high"]
    assert {"faster", "slower", "undecided", "no measurable difference"} == set(verdicts)  # the draws try all four


@pytest.mark.parametrize(
    ("speedup", "gap", "expected"),
    [  # the loss's difference: negative is a gain
        ((1.2, 1.1, 1.3), (-0.2, -0.3, -0.1), "faster"),
        ((1.2, 1.0, 1.4), (-0.2, -0.3, -0.1), "undecided"),
        ((1.2, 1.1, 1.3), (-0.2, -0.4, 0.0), "undecided"),
        ((1.2, 1.1, 1.3), (0.2, 0.1, 0.3), "undecided"),
        ((1.2, 1.0, 1.4), (-0.2, -0.4, 0.0), "no measurable difference"),
        ((0.8, 0.7, 0.9), (0.2, 0.1, 0.3), "slower"),
        ((0.8, 0.7, 1.1), (0.2, 0.1, 0.3), "undecided"),
        ((0.8, 0.7, 0.9), (0.2, -0.1, 0.5), "undecided"),
        ((0.8, 0.7, 0.9), (-0.2, -0.3, -0.1), "undecided"),
        ((0.8, 0.7, 1.1), (0.2, -0.1, 0.5), "no measurable difference"),
    ],
)
def test_a_verdict_needs_both_intervals(monkeypatch, speedup, gap, expected):
    monkeypatch.setattr("lightning_eff.bench.reports.statistics.paired_ratio", lambda pairs: Interval(*speedup, 3))
    monkeypatch.setattr("lightning_eff.bench.reports.statistics.paired_interval", lambda differences: Interval(*gap, 3))
    assert summarize(synthetic.results({"baseline": 1.0, "a": 1.0}))["a"]["verdict"] == expected


def test_two_equal_recipes_are_rarely_told_apart():
    covered = 0
    for draw in range(60):
        made = synthetic.results({f"baseline {draw}": 1.0, f"a {draw}": 1.0}, noise=0.03)
        own = summarize(made)[f"a {draw}"]
        covered += own["speedup"]["low"] <= 1 <= own["speedup"]["high"]
    assert covered >= 51  # as 17 of 20


def in_reference_time(*, rates: list[list[float]], gain: float = 1.1, same: bool = False) -> dict:
    """A bench of one recipe with these rates in its rehearsals, whose seeds agree closely."""
    made = synthetic.results({"baseline": 1.0, "recipe": gain}, noise=1e-4, spread=0.01)
    made["calibration"]["recipe"] |= {"rates": rates, "same_training": same}
    return made


def test_uncertain_prices_widen_what_seeds_agree_on() -> None:
    """The seeds agree, but the arm's step cost is uncertain by a fifth, so its result is uncertain too."""
    sure = statistics.summarize(in_reference_time(rates=[[100.0, 100.0 + i / 10] for i in range(8)]))["recipe"]
    vague = statistics.summarize(in_reference_time(rates=[[100.0, 80.0 + 5 * i] for i in range(8)]))["recipe"]
    for name in ("speedup", "difference"):
        assert vague[name]["high"] - vague[name]["low"] > 2 * (sure[name]["high"] - sure[name]["low"])
        assert vague[name]["estimate"] == sure[name]["estimate"]
    assert sure["verdict"] == "faster" and vague["verdict"] == "no measurable difference"


def test_same_steps_with_another_end_are_not_the_same_training() -> None:
    """Equal speed and equal rehearsals, yet every seed ends better: something acted later, and the metric decides."""
    rates = [[100.0, 100.0 + (-1) ** i / 100] for i in range(8)]
    for gain, source in ((1.5, "metric"), (1.0, "throughput")):
        found = statistics.summarize(in_reference_time(rates=rates, gain=gain, same=True))["recipe"]
        assert found["speedup_from"] == source


def test_a_machine_that_was_busy_now_and_then_does_not_accuse_the_prices() -> None:
    """The arm's runs fell into a busy hour: with the baseline's own varying as much, nothing follows; else a warning."""
    for factors, told in (((1.0, 1.3, 1.1), False), ((1.0, 1.02, 1.01), True)):
        made = synthetic.results({"baseline": 1.0, "recipe": 1.0})
        seeds = made["plan"]["seeds"]
        for run in made["runs"]:
            factor = factors[seeds.index(run["seed"]) % 3] if run["arm"] == "baseline" else 1.5
            run["wall_seconds"] = run["seconds"] * factor
        found = statistics.summarize(made)
        assert ("step costs are therefore too low" in found["recipe"]["sentence"]) == told
        assert "not checked against wall-clock" in " ".join(findings.lines(made, found)), (
            "no stretch is known to be quiet"
        )
