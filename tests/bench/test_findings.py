"""Findings about a whole bench, compared with figures by hand; results as CSV, in a logger, and over several budgets."""

import csv
import math
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_eff.bench import several
from lightning_eff.bench.pace import Budget
from lightning_eff.bench.reports import export, findings, overview, report, words
from lightning_eff.bench.reports.intervals import Interval, t_quantile
from lightning_eff.bench.reports.pareto import APART, offsets, trades
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import save
from tests.bench import synthetic
from tests.bench.test_report import Page


def said_of(made: dict) -> str:
    return " ".join(findings.lines(made, summarize(made)))


def test_verdicts_by_chance_are_counted() -> None:
    """Five arms of `everything` are compared (one failed): 0.25 verdicts by chance, 1 − 0.95^5 = 23 %; three are given."""
    text = said_of(synthetic.everything())
    assert "3 of 5 comparisons are faster or slower" in text
    assert "up to 0.25 such verdicts" in text and "up to 23%" in text


def test_the_advice_follows_from_the_verdicts() -> None:
    made = synthetic.everything()
    lines = findings.advice(made, summarize(made))
    assert len(lines) == 5, "one line per recipe"
    assert lines[0].startswith("Prefer the control 'two layers throughout' to stacking")
    assert lines[1] == "Leave sharpness out: it is slower (0.61 times the baseline's speed)."
    assert lines[2] == "Leave cosine out, or run 21 seeds to decide: it makes no measurable difference."
    assert lines[3].startswith("Fix the failed runs of crashes once") and lines[4].startswith(
        "Fix diverges: it diverged"
    )
    for shown in (report.table(made, 160), " ".join(Page(report.page(made)).words)):
        places = [shown.index(text) for text in ("What to do", lines[0], "stacking is faster")]
        assert places == sorted(places), "the advice comes first"
    arms = [synthetic.arm("baseline", "baseline"), synthetic.arm("a"), synthetic.arm("c", "control", of="a")]
    good = synthetic.results({"baseline": 1.0, "a": 1.8, "c": 1.1}, arms=arms)
    assert findings.advice(good, summarize(good))[0].startswith("Use a: it is faster")
    same = synthetic.results({"baseline": 1.0, "b": 1.0}, seeds=[1, 2])
    assert findings.advice(same, summarize(same))[0].startswith("Run at least 3 seeds of b: it makes no measurable")
    one = synthetic.results({"baseline": 1.0, "a": 1.8}, seeds=[1])
    assert findings.advice(one, summarize(one))[0].startswith("Run at least 3 seeds of a")


@pytest.mark.parametrize(
    ("speedup", "gap", "why"),
    [
        (
            (1.67, 1.22, 2.3),
            (-0.1, -0.3, 0.1),
            r"speed-up's interval excludes 1, but the final val_loss's interval includes 0; ",
        ),
        (
            (1.2, 0.9, 1.5),
            (-0.1, -0.2, -0.05),
            r"final val_loss's interval excludes 0, but the speed-up's interval includes 1; ",
        ),
    ],
)
def test_an_undecided_verdict_names_the_interval_and_the_seeds(
    monkeypatch: pytest.MonkeyPatch, speedup: tuple, gap: tuple, why: str
) -> None:
    """A verdict does not contradict its figures, and says how many seeds would decide."""
    place = "lightning_eff.bench.reports.statistics"
    monkeypatch.setattr(f"{place}.paired_ratio", lambda pairs: Interval(*speedup, 3))
    monkeypatch.setattr(f"{place}.paired_interval", lambda differences: Interval(*gap, 3))
    for needed, end in ((6, "6 seeds would decide it."), (None, "even 200 seeds would not decide it.")):
        monkeypatch.setattr("lightning_eff.bench.reports.findings.seeds_needed", lambda *_, needed=needed: needed)
        own = summarize(synthetic.results({"baseline": 1.0, "a": 1.0}, clock="wall"))["a"]
        assert own["verdict"] == "undecided" and own["seeds_needed"] == needed
        made = synthetic.results({"baseline": 1.0, "a": 1.0}, clock="wall")
        begins = "Leave a out: it is undecided" if needed is None else "Run 6 seeds of a to decide: it is undecided"
        assert findings.advice(made, summarize(made))[0].startswith(begins)
        assert (
            f"a is undecided: the {why}{end} It reaches {speedup[0]:.2f} times the baseline's speed" in own["sentence"]
        )


def test_a_bound_shows_its_sign() -> None:
    show = words.differences({"low": -0.18, "high": -0.0004})
    assert (show(-0.18), show(-0.0004)) == ("−0.1800", "−0.0004")
    assert words.differences({"low": -0.18, "high": 0.1})(-0.18) == "−0.18"


def test_opposite_intervals_are_not_decided_by_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "lightning_eff.bench.reports.statistics"
    monkeypatch.setattr(f"{place}.paired_ratio", lambda pairs: Interval(1.2, 1.1, 1.3, 3))
    monkeypatch.setattr(f"{place}.paired_interval", lambda differences: Interval(0.2, 0.1, 0.3, 3))
    own = summarize(synthetic.results({"baseline": 1.0, "a": 1.1}, clock="wall"))["a"]
    assert own["verdict"] == "undecided" and own["seeds_needed"] is None
    assert "in opposite directions. More seeds would not decide it" in own["sentence"]


@pytest.mark.parametrize(
    ("tuned", "said"),
    [
        (["baseline"], "The baseline was tuned; the recipes were not tuned."),
        (["baseline", "a", "b"], "The baseline was tuned; the recipes were tuned."),
        (["baseline", "b"], "The baseline was tuned; tuned recipes: b; not tuned: a."),
        ([], "The baseline was not tuned; the recipes were not tuned."),
        (None, None),
    ],
)
def test_tuned_arms_are_named_if_the_plan_names_them(tuned: list[str] | None, said: str | None) -> None:
    made = synthetic.results({"baseline": 1.0, "a": 1.1, "b": 1.2})
    made["plan"]["tuned"] = tuned
    assert said in said_of(made) if said else "tuned" not in said_of(made)


def quiet(made: dict, gaps: dict[str, float], seconds: float = 5.0) -> dict:
    for run in made["runs"]:
        if run["arm"] in gaps:
            run["quiet"] = {"seconds": seconds, "wall_seconds": 1.3 * seconds * gaps[run["arm"]], "stretches": 9}
    return made


def test_step_costs_are_checked_in_quiet_stretches() -> None:
    """The machine is 1.3 times as slow as its step costs say, which does not matter. Only "b" is slower than that."""
    gains = {"baseline": 1.0, "a": 1.1, "b": 1.2, "c": 1.0}
    assert "not checked against wall-clock" in said_of(synthetic.results(gains))
    made = quiet(synthetic.results(gains), {"baseline": 1.0, "a": 1.05, "b": 1.25})
    text = said_of(made)
    assert "confirms, within 10 %, the step costs of a;" in text
    assert "contradicts the step costs of b (1.25 times)" in text and "not checked: c" in text
    assert "step costs are therefore too low" in summarize(made)["b"]["sentence"]
    assert "not checked against wall-clock" in said_of(quiet(synthetic.results(gains), dict.fromkeys(gains, 1.0), 0.1))
    made["plan"]["budget"]["clock"] = "wall"
    assert "tep costs" not in said_of(made)


def test_seeds_needed_is_the_least_with_the_power() -> None:
    """By simulation: with so many seeds a t-interval excludes 0 in 80 % of cases; with two fewer in less."""
    random = Random(1)
    given = [random.gauss(1.0, 1.2) for _ in range(6)]
    mean, deviation = fmean(given), stdev(given)
    needed = findings.seeds_needed(given)
    assert needed is not None and needed > 6

    def power(n: int) -> float:
        hits = 0
        for _ in range(4000):
            drawn = [random.gauss(mean, deviation) for _ in range(n)]
            hits += fmean(drawn) > t_quantile(0.975, n - 1) * stdev(drawn) / math.sqrt(n)
        return hits / 4000

    assert power(needed) == pytest.approx(0.8, abs=0.06) and power(needed - 2) < power(needed) - 0.05
    assert findings.seeds_needed(given, fixed=2 * mean) is None, "no number of seeds mends the prices"
    assert findings.seeds_needed([0.01, -0.011, 0.002]) is None


def test_seeds_needed_is_said_of_arms_without_a_measurable_difference() -> None:
    made = synthetic.results({"baseline": 1.0, "c": 1.02, "b": 1.4}, noise=0.03)
    summary = summarize(made)
    assert summary["c"]["verdict"] == "no measurable difference" and summary["b"]["verdict"] == "faster"
    assert summary["b"]["seeds_needed"] is None and "seeds would" not in summary["b"]["sentence"]
    if summary["c"]["seeds_needed"]:
        assert f"{summary['c']['seeds_needed']} seeds would show it" in summary["c"]["sentence"]
    else:
        assert "Even 200 seeds would not show" in summary["c"]["sentence"]


def test_what_differs_in_model_batch_or_rate_is_shown() -> None:
    made = synthetic.results({"baseline": 1.0, "a": 1.1, "b": 1.0})
    base = {"parameters": 1000, "samples a step": 8.0, "optimizer": "AdamW", "techniques": []}
    for name, own in (("baseline", {}), ("a", {"parameters": 500, "techniques": ["X()"]}), ("b", {})):
        made["calibration"][name]["facts"] = base | own
    made["calibration"]["b"]["lr"] = {"peak": 5e-3, "last": 0.0, "peak_at": 0.3}
    rows = [tuple(row.values()) for row in findings.unlike(made)]
    assert rows == [
        ("a", "parameters", "1000", "500"),
        ("b", "peak learning rate", "0.001", "0.005"),
        ("b", "peak reached at", "5% of the budget", "30% of the budget"),
    ]
    for shown in (report.table(made, 120), " ".join(Page(report.page(made)).words)):
        assert "Other differences from the baseline" in shown and "peak learning rate" in shown


def test_configs_tell_what_differs_where_nothing_was_looked_at() -> None:
    texts = ["# a.yaml\nmodel: {init_args: {lr: 1.0, dim: 3}}\ntrainer: {callbacks: []}"]
    arms = [
        synthetic.arm("baseline", "baseline", configs=texts),
        synthetic.arm("a", configs=[*texts, "# b.yaml\nmodel: {init_args: {lr: 2.0}}\ntrainer: {callbacks: [X]}"]),
        synthetic.arm("b", configs=texts),
    ]
    rows = findings.unlike(synthetic.results({"baseline": 1.0, "a": 1.1, "b": 1.0}, arms=arms))
    assert [tuple(row.values()) for row in rows] == [("a", "model.init_args.lr", "1", "2")]


def test_first_steps_that_an_arm_causes_are_shown_apart() -> None:
    made = synthetic.results({"baseline": 1.0, "a": 1.1})
    for run in made["runs"]:
        run["caused_seconds"] = 3.0 if run["arm"] == "a" else 0.0
    assert (
        "spent 5.0% of its budget on the first steps of kinds that the baseline does not have"
        in summarize(made)["a"]["sentence"]
    )
    assert "own first steps" in report.table(made, 160) and "own first steps" in report.page(made)


def test_the_front_is_what_no_arm_beats_in_all_three() -> None:
    made = synthetic.everything()
    found = {one["arm"]: one for one in trades(made, summarize(made))}
    assert found.keys() == {arm["name"] for arm in made["plan"]["arms"]} - {"diverges"}
    assert found["stacking"]["front"] and found["sharpness"]["front"], "the best metric; the least memory"
    assert not found["baseline"]["front"], "cosine is better in the metric, as fast and as small"
    assert found["stacking"]["seconds"] < 60 and found["sharpness"]["seconds"] == 60
    assert found["baseline × 2"]["seconds"] == 120


def test_numbers_cover_no_mark_and_no_other_number() -> None:
    random = Random(1)
    spots = [(random.uniform(0, 200), random.uniform(0, 120)) for _ in range(12)] + [
        (50.0, 50.0),
        (50.0, 50.0),
        (52.0, 53.0),
    ]
    numbers = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(spots, offsets(spots), strict=True)]
    for at, number in enumerate(numbers):
        others = [*spots, *numbers[:at]]
        assert all(math.dist(number, other) >= APART for other in others)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_results_as_csv(tmp_path) -> None:
    made = synthetic.everything()
    made["summary"] = summarize(made)
    names = [file.name for file in export.write_csvs(made, tmp_path / "new")]
    assert names == ["arms.csv", "runs.csv", "points.csv"]
    arms, runs, points = (rows_of(tmp_path / "new" / name) for name in names)
    assert len(arms) == 8 and len(runs) == 24 and len(points) == sum(len(run["points"]) for run in made["runs"])
    stacking = next(row for row in arms if row["arm"] == "stacking")
    assert stacking["verdict"] == "faster" and stacking["kind"] == "recipe"
    assert float(stacking["speedup_low"]) == made["summary"]["stacking"]["speedup"]["low"]
    assert float(runs[0]["final"]) == made["runs"][0]["points"][-1]["metric"]
    assert next(row for row in runs if row["status"] == "crashed")["arm"] == "crashes once"


def test_results_to_any_logger(tmp_path) -> None:
    made = synthetic.everything()
    made["summary"] = summarize(made)
    logger = CSVLogger(tmp_path)
    export.log({"": made}, logger)
    rows = rows_of(Path(logger.log_dir) / "metrics.csv")
    finals = [float(row["stacking/seed2/val_loss"]) for row in rows if row.get("stacking/seed2/val_loss")]
    run = next(run for run in made["runs"] if (run["arm"], run["seed"]) == ("stacking", 2))
    assert finals == pytest.approx([point["metric"] for point in run["points"]])
    (speed,) = [float(row["stacking/speedup"]) for row in rows if row.get("stacking/speedup")]
    assert speed == pytest.approx(made["summary"]["stacking"]["speedup"]["estimate"])


def test_budgets_stand_apart_in_a_logger(tmp_path) -> None:
    every = {}
    for seconds in (20.0, 60.0):
        made = synthetic.everything(budget=seconds)
        every[f"{seconds:g}rs"] = {**made, "summary": summarize(made)}
    logger = CSVLogger(tmp_path)
    export.log(every, logger)
    rows = rows_of(Path(logger.log_dir) / "metrics.csv")
    for budget, results in every.items():
        last = [float(row[f"{budget}/cosine/seed1/seconds"]) for row in rows if row[f"{budget}/cosine/seed1/seconds"]][
            -1
        ]
        assert last == results["plan"]["budget"]["seconds"]
    assert not any(name.startswith("cosine/") for name in rows[0])


def test_budgets_are_parsed_in_order() -> None:
    assert several.parse("60rs, 20rs") == [Budget(20.0, "reference"), Budget(60.0, "reference")]
    assert [several.name(b) for b in several.parse(["1m", 20])] == ["20s", "60s"]
    for wrong in ("20s,20s", "20s,60rs", "", "20s,"):
        with pytest.raises(ValueError, match="expected"):
            several.parse(wrong)


def test_several_budgets_on_one_page(tmp_path) -> None:
    every = {}
    for seconds in (20.0, 60.0):
        made = synthetic.everything(budget=seconds)
        every[f"{seconds:g}rs"] = {**made, "summary": summarize(made)}
        save(every[f"{seconds:g}rs"], tmp_path / f"{seconds:g}rs")
    assert list(several.found(tmp_path)) == ["20rs", "60rs"] and several.found(tmp_path / "20rs") == {}
    several.draw(every, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert {"20rs/report.html", "60rs/report.html"} <= set(page.references)
    assert (tmp_path / "budgets.png").read_bytes().startswith(b"\x89PNG")
    columns, rows = overview.columns_and_rows(every)
    assert [column.head for column in columns][:3] == ["20rs: verdict", "20rs: val_loss", "20rs: speed-up [95 %]"]
    assert next(row for row in rows if row["arm"] == "stacking")["60rs verdict"] == "faster"
    assert [x for x, _, name, _ in overview.front(every) if name == "baseline"] == [20.0, 40.0, 60.0, 120.0]
