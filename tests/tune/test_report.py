"""The report of a search: its pictures show its figures, its page refers to nothing outside, its cost outlives a kill."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.bench.reports.drawing import png
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.monitor._cost import Prices
from lightning_eff.tune.reports import cost, page, pictures, prose
from tests.bench import synthetic
from tests.bench.test_report import Page

pytest.importorskip("matplotlib")


def trial(kind: str, number: int, techniques: dict[str, Any], values: list[float], **more: Any) -> dict[str, Any]:
    parts = dict(zip(("1/9", "1/3", "1/1"), values, strict=False))
    whole = len(values) == 3
    return {
        "kind": kind,
        "number": number,
        "choices": {"own": {"rate": 0.01}, "techniques": techniques},
        "state": "complete" if whole else "pruned",
        "value": values[-1] if whole else None,
        "values": parts,
        "peak_bytes": (600 + 10 * number) * 2**20 if values else None,
        "why": None if whole else "not in the best third at 1/9 of the budget",
        "refused": False,
        "free": False,
        **more,
    }


TRIALS = [
    trial("baseline", 0, {}, [3.0, 2.5, 2.0]),
    trial("baseline", 1, {}, [3.0, 2.4, 1.9]),
    trial("recipes", 0, {"Lookahead": {}, "my.Muon<3>": {"x": 1}}, [2.0, 1.5, 1.2]),
    trial("recipes", 1, {"Lookahead": {"x": 0.5}}, [3.5]),
    trial("recipes", 2, {"RandomLTD": {}}, [], why="RandomLTD: got | no blocks", refused=True),
    trial("recipes", 3, {"RandomLTD": {}}, [], why="RandomLTD: got | no blocks", free=True),
]


def record(**more: Any) -> dict[str, Any]:
    bars = {"name": "Lookahead", "estimate": 0.05, "low": -0.01, "high": 0.11, "dropped": False}
    return {
        "target": "val_loss",
        "mode": "min",
        "budget_seconds": 60.0,
        "memory_bytes": None,
        "finished": "2026-01-02T03:04:05+00:00",
        "recipe": {"own": {}, "techniques": {"Lookahead": {}}},
        "sentence": "Lookahead: <recipe> is faster.",
        "summary": {"sentence": "<recipe> is faster."},
        "contributions": ["Lookahead: +0.05", "my.Muon<3>: not known"],
        "contribution_figures": [bars, bars | {"name": "my.Muon<3>", "estimate": None, "low": None, "high": None}],
        "benches": {"confirm-1234": {"recipe": "<recipe> is faster."}},
        "left_out": {"SequencePacking": "samples are no sequences"},
        "own_left_out": {"batch": "nothing is called so"},
        "trials": TRIALS,
        "history": [
            {"seconds": 10.0 * i, "kind": t["kind"], "number": t["number"], "value": t["value"]}
            for i, t in enumerate(TRIALS, 1)
            if not t["free"]
        ],
        "cost": {"hours": 1.5, "kwh": 0.2, "money": 3.1, "hours_cost": 3.0, "energy_cost": 0.1, "leaves_out": []},
        **more,
    }


def bench(gain: float = 2.0) -> dict[str, Any]:
    found = synthetic.results({"baseline": 1.0, "recipe": gain})
    summary = summarize(found)
    summary["recipe"]["sentence"] = "<recipe> is faster."
    return {**found, "summary": summary}


def test_the_page_has_everything_and_refers_to_nothing_outside() -> None:
    text = page.page(record(), {"confirm-1234": bench()}, ["a step: 3 ms"], "trainer: {max_steps: 7}")
    told = Page(text)
    assert all(one.startswith("data:image/svg+xml;base64,") for one in told.references if "/report.html" not in one)
    assert [one for one in told.references if "/report.html" in one] == ["confirm-1234/report.html"]
    assert text.count("<img ") == 1 + 3 + 1 + 3, (
        "speed-ups; curves, front and memory; contributions; the search's three"
    )
    for said in (
        "&lt;recipe&gt; is faster",
        "Final metric, seconds and memory of each arm",
        "What each technique adds, with 95 % intervals: Lookahead +0.05",
        "Not known: my.Muon&lt;3&gt;",
        "1.5 hours, 0.2 kWh, 3.1 of money (3 for time, 0.1 for electricity)",
        "RandomLTD: got / no blocks (RandomLTD)",
        "SequencePacking: samples are no sequences",
        "max_steps: 7",
        "a step: 3 ms",
    ):
        assert said in text, said


def test_where_nothing_was_confirmed_the_page_says_why_there_are_no_curves() -> None:
    stands = record(recipe=None, sentence="The baseline stands: so.", summary={}, contributions=[], benches={})
    text = page.page({**stands, "contribution_figures": []}, {}, [], None)
    assert page.NO_CURVES in text and "<summary>The recipe" not in text and text.count("<img ") == 3
    nothing = page.page({**stands, "contribution_figures": [], "trials": [], "history": []}, {}, [], None)
    assert nothing.count("<img ") == 0


def test_the_bench_that_decided_is_shown() -> None:
    faster, other = bench(), bench(1.2)
    other["summary"]["recipe"]["sentence"] = "recipe told otherwise."
    told = record(benches={"confirm-1": {}, "reduced-2": {}})
    assert page.decided(told, {"confirm-1": other, "reduced-2": faster}) == "reduced-2"
    assert page.decided(told, {"confirm-1": faster, "reduced-2": other}) == "confirm-1"
    assert page.decided(record(benches={}), {}) is None
    said = (
        "Lookahead: <recipe> is faster. Without what seems to add nothing it was not confirmed: recipe told otherwise."
    )
    told = record(sentence=said, benches={"confirm-1": {}, "reduced-2": {}})
    assert page.decided(told, {"confirm-1": faster, "reduced-2": other}) == "confirm-1", "that of the recipe is shown"


def test_what_came_on_and_diverged_then_was_not_left() -> None:
    late = trial("recipes", 4, {"RandomLTD": {}}, [2.0], why="diverged: the training loss is nan at step 7.")
    assert pictures.tries(record(trials=[late])) == {"RandomLTD": [0, 0, 1]}


def test_pictures_show_the_figures() -> None:
    told = record()
    assert pictures.tries(told) == {"Lookahead": [1, 1, 0], "RandomLTD": [0, 0, 1], "my.Muon<3>": [1, 0, 0]}
    assert pictures.bests([3.0, 2.0, 2.5, 1.0], "min") == [3.0, 2.0, 2.0, 1.0]
    assert pictures.bests([3.0, 2.0, 4.0], "max") == [3.0, 3.0, 4.0]
    drawn = {one.name: one for one in (draw(told) for draw in pictures.ALL) if one is not None}
    assert set(drawn) == {"contributions", "history", "tried", "trials_memory"}
    (axes,) = drawn["contributions"].figure.axes
    assert [bar.get_width() for bar in axes.patches] == [0.05]
    assert next(list(line.get_xdata()) for line in axes.lines) == [-0.01, 0.11]
    steps = {line.get_label(): list(line.get_ydata()) for line in drawn["history"].figure.axes[0].lines}
    assert steps["best: baseline"] == [2.0, 1.9, 1.9] and steps["best: recipes"] == [1.2, 1.2]
    assert "recipes 1.2 at 600 MiB" in drawn["trials_memory"].alternative
    assert "baseline 1.9" not in drawn["trials_memory"].alternative, "beaten in both"
    assert all(png(one)[:4] == b"\x89PNG" for one in drawn.values())


def test_a_report_begins_with_what_to_do() -> None:
    found, stands = record(), record(recipe=None, sentence="The baseline won: so.")
    for told, first, more in (
        (found, "Train with this recipe: `lightning-eff fit --config recipe.yaml`.", "Lookahead: <recipe> is faster."),
        (stands, "Keep your baseline.", "rate 0.01 reached val_loss 1.9, and your settings 2, on one seed"),
    ):
        lines = prose.report(told, ["a step: 3 ms"])
        assert lines[2] == "## What to do" and lines[4].startswith(f"- {first}")
        assert more in "\n".join(lines[4:8])
        text = page.page(told, {}, ["a step: 3 ms"], None)
        assert text.index("<h2>What to do</h2>") == text.index("<h2>")
    same = record(recipe=None, trials=TRIALS[:1])
    assert len(prose.to_do(same)) == 2, "no other settings were better"


def test_what_was_left_out_is_folded() -> None:
    text = "\n".join(prose.report(record(), ["a step: 3 ms"]))
    assert text.count("<details>") == text.count("</details>") == 4
    for told in ("SequencePacking: samples are no sequences", "RandomLTD: got / no blocks (", "a step: 3 ms"):
        before = text[: text.index(told)]
        assert before.count("<details>") == before.count("</details>") + 1, told


def test_a_trial_that_had_no_more_time_is_no_failure() -> None:
    late = trial("recipes", 4, {"RandomLTD": {}}, [2.0], state="running", why=None)
    assert pictures.tries(record(trials=[late])) == {"RandomLTD": [0, 1, 0]}
    _, rows = prose.columns_and_rows(record(trials=[late]))
    assert rows[0]["why"] == prose.UNFINISHED


def test_no_label_covers_a_line() -> None:
    drawn = pictures.contributions(record())
    assert drawn is not None
    drawn.figure.draw_without_rendering()
    (axes,) = drawn.figure.axes
    labels = [text.get_window_extent() for text in axes.texts]
    lines = [line.get_window_extent() for line in axes.lines]
    assert len(lines) == 4 and not any(label.overlaps(line) for label in labels for line in lines)


def test_words_have_what_the_page_has() -> None:
    text = "\n".join(prose.report(record(), ["a step: 3 ms"]))
    assert "2 trials of the baseline's own settings, of which 2 had the whole budget; 3 trials of recipes" in text
    assert "Trials per technique: Lookahead 2, RandomLTD 1, my.Muon<3> 1." in text
    assert "| recipes 2 | Lookahead(x=0.5) with rate 0.01 | 3.5 |" in text
    assert "- RandomLTD: got / no blocks (RandomLTD)" in text and "1.5 hours, 0.2 kWh" in text


class Meter:
    """Energy of a machine that has a counter: 3.6 kJ a look."""

    sources = ["RAPL package-0"]

    def __init__(self) -> None:
        self.joules = 0.0

    def start(self) -> None:
        self.joules = 0.0

    def read(self) -> float:
        self.joules += 3600.0
        return self.joules

    stop = read


def test_the_cost_of_a_search_that_was_killed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 1800))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    (tmp_path / "profile.json").write_text("{}")
    prices = Prices(2.0, 100.0)
    with pytest.raises(KeyboardInterrupt):
        with cost.Ledger(tmp_path, prices, meter=Meter) as ledger:  # pyright: ignore[reportArgumentType]
            first = ledger.keep()
            raise KeyboardInterrupt
    assert first == json.loads(json.dumps(first)) and first["hours"] == 0.5 and first["kwh"] == pytest.approx(0.001)
    assert json.loads((tmp_path / "cost.json").read_text())["hours"] == 1.0
    with cost.Ledger(tmp_path, prices, meter=Meter) as ledger:  # pyright: ignore[reportArgumentType]
        last = ledger.keep()
    assert last["hours"] == 1.5 and last["kwh"] == pytest.approx(0.003)
    assert last["money"] == pytest.approx(2.0 * 1.5 + 100 * 0.003) and not last["leaves_out"]
    assert cost.in_words(last) == "1.5 hours, 0.003 kWh, 3.3 of money (3 for time, 0.3 for electricity)."


def test_a_search_that_is_killed_in_a_long_bench_has_its_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told while it confirms, and nothing is left to say when it is killed."""
    monkeypatch.setattr(cost, "EVERY", 0.01)
    (tmp_path / "profile.json").write_text("{}")
    with cost.Ledger(tmp_path, Prices(), meter=Meter):  # pyright: ignore[reportArgumentType]
        for _ in range(500):
            if (tmp_path / "cost.json").is_file():
                break
            time.sleep(0.01)
        kept = json.loads((tmp_path / "cost.json").read_text())
    assert kept["hours"] > 0 and kept["kwh"] == pytest.approx(0.001 * round(kept["kwh"] / 0.001))


def test_energy_is_that_of_the_device_which_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search counts from before anything computes on it."""
    asked: list[Any] = []

    class OfDevice(Meter):
        def __init__(self, device: Any = None) -> None:
            super().__init__()
            asked.append(device and device.type)

    monkeypatch.setattr(cost, "EnergyMeter", OfDevice)
    for device in ("cuda", "cpu"):
        cost.Ledger(tmp_path, Prices(), device=device)
    assert asked == ["cuda", "cpu"]


def test_a_cost_says_what_it_lacks(tmp_path: Path) -> None:
    class Dark(Meter):
        sources: list[str] = []

        def read(self) -> None:
            return None

        stop = read

    with cost.Ledger(tmp_path, Prices(2.0, 0.3), meter=Dark) as ledger:  # pyright: ignore[reportArgumentType]
        told = cost.in_words(ledger.keep())
    assert "energy unknown on this machine" in told and "at least" in told and "no readable RAPL" in told
    assert not (tmp_path / "cost.json").exists(), "nothing was begun"
    with cost.Ledger(tmp_path, Prices(), meter=Dark) as ledger:  # pyright: ignore[reportArgumentType]
        assert "no price was given" in cost.in_words(ledger.keep())
