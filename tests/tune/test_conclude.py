"""From a search to a verdict: what is confirmed, what is dropped, what is written, and what is refused as dishonest."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_eff import cli
from lightning_eff._cli.errors import UsageError
from lightning_eff._core.search_space import RunProfile, SearchSpace, Uniform
from lightning_eff.bench import calibration
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.references import mean_cost
from lightning_eff.bench.running.workers import InProcess
from lightning_eff.tune.concluding import Finding
from lightning_eff.tune.config import Choices, Recipes
from lightning_eff.tune.confirm import Bench, contribution
from lightning_eff.tune.own import Own
from lightning_eff.tune.reports.prose import report
from lightning_eff.tune.reports.writing import recipe
from lightning_eff.tune.search import Outcome, Search
from lightning_eff.tune.space import Candidate, Space
from lightning_eff.tune.trials import Trials, dishonest
from lightning_eff.tune.tuner import Tuner
from tests.tune import tasks
from tests.tune.tasks import Here, config

pytest.importorskip("optuna")

WAITING = "model: {class_path: tests.tune.tasks.Waiting}"
BRIEF = "model: {class_path: tests.tune.tasks.Waiting, init_args: {pause: 0.002}}"
GOOD, BAD = "tests.tune.tasks.Halving", "tests.tune.tasks.Neutral"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.tune.tuner.Places", Here)
    monkeypatch.setattr("lightning_eff.bench.benchmark.Workers", lambda *args: InProcess())


def space() -> Space:
    techniques = {name: Candidate(name, getattr(tasks, name.rpartition(".")[2]), SearchSpace()) for name in (GOOD, BAD)}
    return Space((), {}, techniques, {}, 3, RunProfile())


class Look:
    found = type("Found", (), {"steps": 100})
    space = space()


class FakeBench:
    """A bench in which GOOD is faster and BAD adds nothing.

    ``never`` confirms nothing, ``memory`` is what stacks without BAD use too much of, ``refuses`` is a bench that compares
    nothing, and ``alike`` lets either technique be as good as both.
    """

    baseline = Choices()
    sign = 1.0

    def __init__(
        self, *, never: bool = False, memory: int | None = None, refuses: str | None = None, alike: bool = False
    ) -> None:
        self.asked: dict[str, Any] = {}
        self.never, self.memory, self.refuses, self.alike = never, memory, refuses, alike
        self.known: set[str] = set()  # names of benches that were begun before

    leave_one_out = staticmethod(Bench.leave_one_out)

    baseline_steps = 100

    def begun(self, name: str, arms: dict[str, Choices]) -> bool:
        return name in self.known

    def run(self, name: str, arms: dict[str, Choices], *, controls: bool) -> dict[str, Any]:
        self.asked[name] = {arm: sorted(choices.techniques) for arm, choices in arms.items()}
        if name == self.refuses:
            raise Incomparable("such a stack has other data")
        good = {arm: (GOOD in choices.techniques or self.alike) and not self.never for arm, choices in arms.items()}
        summary = {
            arm: {
                "verdict": "faster" if good[arm] else "no difference shown",
                "sentence": f"{arm} told.",
                "speedup": {"estimate": 2.0},
            }
            for arm in arms
        }
        runs = [
            {
                "arm": arm,
                "seed": seed,
                "status": "finished",
                "points": [{"metric": (1.0 if good[arm] else 2.0) + seed / 100}],
                "peak_memory_bytes": (1 if BAD in arms[arm].techniques else 3) * 2**30,
            }
            for arm in arms
            for seed in (1, 2, 3)
        ]
        return {
            "folder": name,
            "summary": summary,
            "runs": runs,
            "calibration": {arm: {"steps": 200} for arm in ("baseline", *arms)},
        }

    def contributions(self, choices: Choices) -> list[Any]:
        results = self.run("leave_one_out", self.leave_one_out(choices), controls=False)
        return [contribution(results, name, self.sign, self.memory) for name in choices.techniques]


def searched(folder: Path, values: dict[tuple[str, ...], float]) -> Search:
    """A search whose recipes have these values, and the baseline 1."""

    def run(choices: Choices, budget: float) -> Outcome:
        return Outcome(values.get(tuple(sorted(choices.techniques)), 3.0) if choices.techniques else 1.0)

    search = Search(space(), run, folder, mode="min", budget=9.0, seconds=1e6, limit=12)
    search.search()
    return search


def test_what_is_confirmed_stands_without_what_adds_nothing(tmp_path: Path) -> None:
    search = searched(tmp_path, {tuple(sorted((GOOD, BAD))): 0.5, (GOOD,): 0.6})
    bench, lines = FakeBench(), list[str]()
    found = Finding(Look, search, bench).conclude(lines.append)  # pyright: ignore[reportArgumentType]
    assert found.recipe is not None and list(found.recipe.techniques) == [GOOD]
    assert found.steps == found.baseline_steps == 200
    assert bench.asked["confirm"] == {"recipe": sorted((GOOD, BAD))}, (
        "each stack once; the search tried it several times"
    )
    assert bench.asked["leave_one_out"] == {
        "recipe": sorted((GOOD, BAD)),
        f"without {GOOD}": [BAD],
        f"without {BAD}": [GOOD],
    }
    assert bench.asked["reduced"] == {"recipe": [GOOD]}, "what is left is held against the baseline by itself"
    told = {part.name: part.describe() for part in found.contributions}
    assert told[BAD].endswith("dropped") and "+1 [" in told[GOOD] and "dropped" not in told[GOOD]


def test_what_is_not_confirmed_leaves_the_baseline(tmp_path: Path) -> None:
    search = searched(tmp_path, {(GOOD,): 0.6})
    found = Finding(Look, search, FakeBench(never=True)).conclude(lambda line: None)  # pyright: ignore[reportArgumentType]
    assert found.recipe is None and found.sentence.startswith(
        "The baseline won: no recipe of the search was confirmed on new seeds. "
    )
    search = searched(tmp_path / "worse", {(GOOD,): 1.5})
    bench = FakeBench()
    found = Finding(Look, search, bench).conclude(lambda line: None)  # pyright: ignore[reportArgumentType]
    assert "no recipe of the search reached the tuned baseline's 1: the best recipe got 1.5" in found.sentence
    assert not bench.asked, "no bench is run in vain"
    assert found.baseline_steps == 100, "what its trial told"


def test_what_saves_the_memory_that_there_is_stays(tmp_path: Path) -> None:
    """Without it a run is as fast, and too large."""
    search = searched(tmp_path, {tuple(sorted((GOOD, BAD))): 0.5})
    bench = FakeBench(memory=2 * 2**30)
    found = Finding(Look, search, bench).conclude(lambda line: None)  # pyright: ignore[reportArgumentType]
    assert found.recipe is not None and sorted(found.recipe.techniques) == sorted((GOOD, BAD))
    assert "reduced" not in bench.asked, "what it would be left out of is too large"
    told = {part.name: part.describe() for part in found.contributions}
    assert (
        told[BAD].endswith("kept because a run without it is too large: it used 3 GiB, more than the limit of 2 GiB")
        and not found.contributions[0].dropped
    )
    bench = FakeBench(memory=2**29)
    found = Finding(Look, search, bench).conclude(lambda line: None)  # pyright: ignore[reportArgumentType]
    assert found.recipe is None, "faster, and larger on fresh seeds than it may be"
    assert found.sentence.endswith("recipe told. But it used 1 GiB, more than the limit of 0.5 GiB.")


def test_what_stays_in_the_recipe_is_not_told_to_be_dropped(tmp_path: Path) -> None:
    search = searched(tmp_path, {tuple(sorted((GOOD, BAD))): 0.5})
    both = sorted((GOOD, BAD))
    for bench, said in (
        (FakeBench(alike=True), "as good without any one of its techniques, so none is dropped"),
        (
            FakeBench(refuses="reduced"),
            f"Without the techniques that add nothing ({BAD}) it cannot be compared: such a stack has",
        ),
        (
            FakeBench(refuses="leave_one_out"),
            "The gain of each technique was not measured: such a stack has other data",
        ),
    ):
        found = Finding(Look, search, bench).conclude(lambda line: None)  # pyright: ignore[reportArgumentType]
        assert found.recipe is not None and sorted(found.recipe.techniques) == both, "what was confirmed is not lost"
        assert said in found.sentence
        assert not any(part.dropped or "dropped" in part.describe() for part in found.contributions)


class Barring(FakeBench):
    """Refuses to hold a stack with BAD in it, and with it whatever else it was to hold."""

    def run(self, name: str, arms: dict[str, Choices], *, controls: bool) -> dict[str, Any]:
        if any(BAD in choices.techniques for choices in arms.values()):
            raise Incomparable(f"{name}: no stack with {BAD}")
        return super().run(name, arms, controls=controls)


def test_a_recipe_that_cannot_be_held_takes_no_other_with_it(tmp_path: Path) -> None:
    search = searched(tmp_path, {})
    few = [Choices(techniques={name: {} for name in names}) for names in ((GOOD, BAD), (GOOD,))]
    bench = Barring()
    finding = Finding(Look, search, bench)  # pyright: ignore[reportArgumentType]
    arms, results = finding._compared(few)
    assert arms == {"recipe": few[1]} and results["summary"]["recipe"]["verdict"] == "faster"
    assert bench.asked == {"confirm": {"recipe": [GOOD]}}
    short = Finding(Look, search, Barring(), seconds=lambda arms, known: 2.0, left=lambda: 1.0)  # pyright: ignore[reportArgumentType]
    for finding, those in ((short, few), (Finding(Look, search, Barring()), few[:1])):  # pyright: ignore[reportArgumentType]
        with pytest.raises(Incomparable, match="confirm: no stack with"):
            finding._compared(those)


def test_a_recipe_that_ties_is_not_said_to_fall_short(tmp_path: Path) -> None:
    search = searched(tmp_path, {(GOOD,): 1.0})
    found = Finding(Look, search, FakeBench()).conclude(lambda line: None)  # pyright: ignore[reportArgumentType]
    assert found.sentence == "The baseline won: no recipe of the search beat the tuned baseline's 1"


def test_a_run_must_have_taken_and_cost_what_it_tells_of() -> None:
    record = {
        "wall_seconds": 10.0,
        "warmup_seconds": 0.0,
        "validation_seconds": 1.0,
        "kinds": [{"kind": "a", "count": 100}],
    }
    assert dishonest(record, {"a": 0.1}, 10.0, 12.0) is None
    assert "reports 11 s, and took 22 s by another clock" in str(dishonest(record, {"a": 0.1}, 10.0, 22.0))
    assert "cost 20 s at their calibrated costs, of a budget of 10 s" in str(dishonest(record, {"a": 0.2}, 10.0, 12.0))
    few = {**record, "kinds": [{"kind": "a (accumulates)", "count": 21}, {"kind": "a", "count": 3}]}
    prices = {"a": 0.5, "a (accumulates)": 0.5}
    assert dishonest(few, prices, 10.0, 12.0, batches=8) is None, "three steps, of which 2.5 were paid for"
    assert "cost 12 s at their calibrated costs" in str(dishonest(few, prices, 10.0, 12.0)), "24 steps"


def test_a_recipe_is_a_whole_config_for_as_many_steps(tmp_path: Path) -> None:
    file = Path(config(tmp_path))
    file.write_text(file.read_text().replace("devices: 1", "devices: 1, max_time: '00:00:01:00', max_epochs: 3"))
    text = recipe(Recipes([str(file)], space(), scheduled=True), Choices(techniques={GOOD: {}}), 123, "It\nis faster.")
    assert text.startswith("# Found by lightning-eff tune.\n# It is faster.\n")
    told = yaml.safe_load(text)
    assert told["trainer"] == {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "callbacks": [{"class_path": GOOD}],
        "max_steps": 123,
    }
    assert told["model"] == {"class_path": "tests.tune.tasks.Regression"}


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuner, Any]:
    folder = tmp_path_factory.mktemp("trials")
    names = (
        "Halving",
        "Seldom",
        "Shrinking",
        "Peeking",
        "Lying",
        "HandFed",
        "HandFedBelow",
        "Spread",
        "CrashingOnLarge",
        "CrashingLate",
        "Wrapping",
        "Keeping",
        "OffTheClock",
    )
    include = [f"tests.tune.tasks.{name}" for name in names]
    tuner = Tuner(
        config(folder, WAITING), target="val_loss", budget=0.8, include=include, out=folder / "out", threads=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_eff.tune.tuner.Places", Here)
        return tuner, tuner.look()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Halving", None),
        ("Shrinking", "its parameters 9 differs from the baseline's 161"),
        ("Peeking", "got a training set of 64 items"),
        ("Lying", "at their calibrated costs, of a budget of 0.8 s"),
        ("HandFed", "that it trained on are in the validation set, and 0 of"),
        (
            "HandFedBelow",
            "its training changes with the validation data: other validation data made the loss of batch 0",
        ),
        (
            "Spread",
            "it does not train with other validation data (crashed: ZeroDivisionError: no spread); expected the same",
        ),
        pytest.param("Wrapping", "that it trained on are in the validation set", marks=pytest.mark.slow),
        pytest.param("Keeping", "that it trained on are in the validation set", marks=pytest.mark.slow),
        ("OffTheClock", "weights change during validation"),
    ],
)
def test_a_planted_gain_counts_and_a_planted_fake_is_refused(
    looked: tuple[Tuner, Any], name: str, why: str | None, tmp_path: Path
) -> None:
    _, look = looked
    trials = Trials(look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=0.8, seed=0, threads=1)  # pyright: ignore[reportArgumentType]
    choices = Choices(techniques={f"tests.tune.tasks.{name}": {}})
    outcome = trials(choices, 0.8)
    if why is None:
        prices = json.loads(trials._files(choices)[1].read_text())["prices"]
        assert outcome.value is not None
        assert mean_cost(prices) < 0.85 * mean_cost(calibration.prices([look.found.probe])), (
            prices,
            look.found.step_seconds,
        )
        small = Trials(
            look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=0.8, seed=0, threads=1, memory=1
        )  # pyright: ignore[reportArgumentType]
        assert "the limit of 9.31e-10 GiB" in str(small(choices, 0.8).why)
    else:
        assert outcome.refused and outcome.value is None and why in str(outcome.why)


def test_what_crashes_with_a_large_batch_is_not_refused_with_all(looked: tuple[Tuner, Any], tmp_path: Path) -> None:
    """It is no fault of the stack."""
    _, look = looked
    trials = Trials(look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=0.8, seed=0, threads=1)  # pyright: ignore[reportArgumentType]
    stack = {"tests.tune.tasks.CrashingOnLarge": {}}
    outcome = trials(Choices({"batch": 64}, stack), 0.8)
    assert outcome.crashed and not outcome.refused and "out of memory" in str(outcome.why)
    assert trials(Choices({"batch": 16}, stack), 0.8).value is not None
    late = trials(Choices(techniques={"tests.tune.tasks.CrashingLate": {}}), 0.8)
    assert late.crashed and not late.refused and str(late.why).startswith("crashed: "), (
        "in its run, as in its rehearsal"
    )


def test_the_steps_of_choices_are_those_of_their_own_rehearsal(looked: tuple[Tuner, Any], tmp_path: Path) -> None:
    """A batch of twice the price leaves half of the steps; it rehearses where no trial had it."""
    tuner, look = looked
    trials = Trials(look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=0.8, seed=0, threads=1)  # pyright: ignore[reportArgumentType]
    own = Choices({"batch": 32})
    assert not trials.rehearsed(own)
    steps = trials.steps(own)
    assert trials.rehearsed(own) and steps == pytest.approx(look.found.steps, rel=0.3), "each pauses as long"
    file = trials._files(own)[1]
    told = json.loads(file.read_text())
    prices = [{**price, "seconds": 2 * price["seconds"]} for price in told["prices"]]
    file.write_text(json.dumps({**told, "prices": prices}))
    assert trials.steps(own) == pytest.approx(steps / 2, abs=2)

    class Searched:
        run = trials

        def best(self, kind: str) -> dict[str, Any]:
            return {"choices": own.record()}

    bench = tuner._bench(look, Searched(), progress=False)  # pyright: ignore[reportArgumentType]
    assert bench.baseline_steps == trials.steps(own), (
        "which the tuned baseline is written for, where no bench told better"
    )
    file.write_text(json.dumps({**told, "status": "crashed"}))
    assert trials.steps(own) == look.found.steps


def test_each_arm_of_a_bench_has_a_warm_up_of_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in its trial: with a batch of four times the price, a fifth of the budget is a quarter of the steps."""
    made: dict[str, Any] = {}

    class Made:
        def __init__(self, baseline: Any, recipes: Any, **more: Any) -> None:
            made.update({"baseline": baseline, **recipes})

        def run(self, **more: Any) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("lightning_eff.tune.confirm.Benchmark", Made)
    warm_up = Own("warm_up", Uniform(0.0, 0.3), 2, "model.init_args.warmup_steps", in_steps=True)
    recipes = Recipes([config(tmp_path)], replace(space(), own=(warm_up,)), scheduled=True)
    own = {"warm_up": 0.2}
    arms = {"recipe": Choices(own, {GOOD: {}}), "other": Choices({"warm_up": 0.0}, {GOOD: {}})}
    steps = {Choices(own).key: 1000, arms["recipe"].key: 250, arms["other"].key: 250}
    settings = {"target": "val_loss", "mode": "min", "budget": 1.0, "seeds": [1, 2], "threads": 1, "jobs": 1}
    bench = Bench(
        recipes,
        Choices(own),
        lambda choices: steps[choices.key],
        tmp_path,
        baseline_steps=100,
        progress=False,
        drawn=False,
        **settings,
    )
    bench.run("confirm", arms, controls=True)
    told = {name: yaml.safe_load(Path(paths[-1]).read_text())["model"]["init_args"] for name, paths in made.items()}
    assert told == {
        "baseline": {"warmup_steps": 200},
        "recipe": {"warmup_steps": 50},
        "other": {"warmup_steps": 0},
    }
    assert all(isinstance(one["warmup_steps"], int) for one in told.values()), (
        "which is what an argument of steps takes"
    )
    assert recipes.counts_steps(Choices(own)) and not recipes.counts_steps(Choices({"batch": 32}))
    few = recipes.overlay(Choices({"warm_up": 0.001}), 100)
    assert few["model"]["init_args"]["warmup_steps"] == 1, "above 0 is a step at least"


def test_what_is_done_in_every_fifth_step_is_in_the_price(looked: tuple[Tuner, Any], tmp_path: Path) -> None:
    """Its steps cost twice the baseline's on average, and four of five as much as these."""
    _, look = looked
    trials = Trials(look.recipes, look.found, Here(), tmp_path, target="val_loss", budget=0.8, seed=0, threads=1)  # pyright: ignore[reportArgumentType]
    choices = Choices(techniques={"tests.tune.tasks.Seldom": {}})
    assert trials(choices, 0.8).value is not None
    prices = json.loads(trials._files(choices)[1].read_text())["prices"]
    assert mean_cost(prices) > 1.5 * mean_cost(calibration.prices([look.found.probe]))


def test_a_search_that_holds_too_little_says_how_much_it_needs(looked: tuple[Tuner, Any]) -> None:
    tuner, _ = looked
    tuner.search = 0.01
    with pytest.raises(
        UsageError, match=r"--search 0s is too short to confirm anything\. .* Set --search to \d+s or more"
    ):
        tuner.run(progress=False)


def test_a_config_to_which_nothing_applies_is_not_searched(looked: tuple[Tuner, Any], tmp_path: Path) -> None:
    tuner, _ = looked
    none = Tuner(
        tuner.paths, target="val_loss", budget=0.8, search=1e6, include=["ProgressiveStacking"], out=tmp_path / "out"
    )
    with pytest.raises(UsageError, match="No technique applies to this config"):
        none.run(progress=False)


def test_a_search_from_config_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole, once: what it says, what it writes, and that it goes on."""
    monkeypatch.setattr("lightning_eff.tune.tuner.Search", functools.partial(Search, limit=3))
    arguments = [
        "tune",
        "--baseline",
        config(tmp_path, WAITING),
        "--target=val_loss",
        "--budget=1s",
        "--search=1000m",
        "--quiet",
    ]
    arguments += [
        "--include",
        GOOD,
        "--out",
        str(tmp_path / "out"),
        "--threads=1",
        "--seeds=2",
        "--price-per-hour=3600",
    ]
    cli.main(arguments)
    out = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["sentence"] in out and results["cost"]["money"] == pytest.approx(3600 * results["cost"]["hours"])
    kinds = [trial["kind"] for trial in results["trials"] if not trial["free"]]
    assert set(kinds) == {"baseline", "recipes"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## The search" in text and "What was left out, and why" in text and "SequencePacking: not included" in text
    assert yaml.safe_load((tmp_path / "out" / "baseline_tuned.yaml").read_text())["trainer"]["max_steps"] > 20
    for bench in (tmp_path / "out").glob("confirm-*/results.json"):
        told = json.loads(bench.read_text())["calibration"]["baseline"]["steps"]
        tuned = yaml.safe_load((tmp_path / "out" / "baseline_tuned.yaml").read_text())
        assert tuned["trainer"]["max_steps"] == told, "as many as its runs in the bench had"
    assert (tmp_path / "out" / "recipe.yaml").is_file() == (results["recipe"] is not None)
    assert "The search" in (tmp_path / "out" / "report.html").read_text() and str(tmp_path / "out/report.html") in out
    lines = report(results, ["a line"])
    assert lines[0] == "# What tuning found" and "- a line" in lines[-5:]
    cli.main(arguments)
    again = json.loads((tmp_path / "out" / "results.json").read_text())["trials"]
    for kind in ("baseline", "recipes"):
        before = [trial for trial in results["trials"] if trial["kind"] == kind]
        after = [trial for trial in again if trial["kind"] == kind]
        assert after[: len(before)] == before, "what was tried is not tried again"


def test_another_best_has_a_bench_of_its_own_and_knows_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, list[str]]] = []

    class Made:
        def __init__(self, *args: Any, out: Path, known: list[Path], **more: Any) -> None:
            made.append((out.name, [folder.name for folder in known]))

        def run(self, **more: Any) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("lightning_eff.tune.confirm.Benchmark", Made)
    recipes = Recipes([config(tmp_path)], space(), scheduled=True)

    def bench(baseline: Choices) -> Bench:
        settings = {"target": "val_loss", "mode": "min", "budget": 1.0, "seeds": [1, 2], "threads": 1, "jobs": 1}
        return Bench(
            recipes,
            baseline,
            lambda choices: 100,
            tmp_path,
            baseline_steps=100,
            progress=False,
            drawn=False,
            **settings,
        )

    first = bench(Choices())
    stacks = [Choices(techniques={name: {}}) for name in (GOOD, BAD, GOOD)]
    folders = [first.run("confirm", {"recipe": choices}, controls=True)["folder"] for choices in stacks]
    assert folders[0] == folders[2] != folders[1] and [name for name, _ in made] == folders
    assert [known for _, known in made] == [[], [folders[0]], [folders[1]]], "a bench that goes on does not ask itself"
    bench(Choices()).run("reduced", {"recipe": stacks[0]}, controls=True)
    assert sorted(made[-1][1]) == sorted(folders[:2]), "a search that goes on, too"
    bench(Choices(techniques={BAD: {}})).run("confirm", {"recipe": stacks[0]}, controls=True)
    assert made[-1][1] == [], "another baseline was trained otherwise"
