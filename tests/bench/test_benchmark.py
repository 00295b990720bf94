"""The whole bench on functions: verdicts, refusals, failures, controls, and continuation."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_eff import ProgressiveStacking, SelectiveBackprop
from lightning_eff.bench.arms import Arm, lay_out, named
from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.pace import Budget, Incomparable
from lightning_eff.bench.references import References
from lightning_eff.monitor.machine import fingerprint
from tests.bench.tasks import Constant, Delay, Fail, Small, arm, dataset
from tests.bench.test_pacer import KIND
from tests.bench.test_references import price
from tests.conftest import Once
from tests.models import TinyGPT, loader, module

DEFAULTS = {"target": "val_loss", "budget": "4rs", "seeds": 2, "rounds": 2, "evaluations": 3, "threads": 1}
STEP = 0.04  # the reference seconds of a step: a budget holds as many steps on a busy machine as on an idle one


def bench(recipes: dict, folder: Path, baseline=None, **more) -> Benchmark:
    baseline = baseline or arm()
    if "reference" not in more:
        more["reference"] = step_costs(baseline, folder.parent / f"{folder.name}-steps.json")
    return Benchmark(baseline, recipes, out=folder, **{**DEFAULTS, **more})


def step_costs(baseline: Any, file: Path) -> Path:
    """Write the step costs of a baseline, so that nothing in a bench but the ratio of speeds is measured."""
    if callable(baseline):
        References(file).apply(Arm("baseline", "baseline", baseline), fingerprint(1), {"baseline": [price(KIND, STEP)]})
    return file


@pytest.fixture(scope="module")
def several(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One bench for several tests: a copy, an arm with a delay of several times a step, another rate, and a ladder."""

    def run() -> dict[str, Any]:
        state, seed, threads = torch.get_rng_state(), os.environ.get("PL_GLOBAL_SEED"), torch.get_num_threads()
        folder = tmp_path_factory.mktemp("several")
        recipes = {
            "copy": arm(),
            "slow": arm(callbacks=lambda: [Delay(0.06)]),
            "faster": arm(lambda: Small(lr=0.2)),
        }
        results = bench(recipes, folder, ladder=[0.5, 2.0]).run(progress=False, report=False)
        untouched = torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads
        return {
            "results": results,
            "written": json.loads((folder / "results.json").read_text()),
            "untouched": untouched and os.environ.get("PL_GLOBAL_SEED") == seed,
            "folder": str(folder),
        }

    return once("bench_several", run)


def test_two_copies_train_alike(several: dict[str, Any]) -> None:
    results = several["results"]
    assert results["calibration"]["copy"]["same_training"]
    runs = {(run["arm"], run["seed"]): run for run in results["runs"] if run["arm"] in ("baseline", "copy")}
    assert len(runs) == 4 and all(run["status"] == "finished" for run in results["runs"])
    for run in runs.values():
        assert run["seconds"] == pytest.approx(4.0, rel=0.1) and len(run["points"]) == 3
        assert run["lr_last_share"] < 0.1 and run["samples"] == 8 * run["steps"] and run["peak_memory_bytes"] > 1e6
    assert runs["baseline", 1]["losses"][0] != runs["baseline", 2]["losses"][0], "seeds draw alike"
    assert runs["baseline", 1]["losses"][0][1] == runs["copy", 1]["losses"][0][1], "arms of one seed do not"
    assert several["written"]["summary"] == results["summary"] and several["untouched"]


def test_a_slower_arm_makes_fewer_steps_in_the_same_budget(several: dict[str, Any]) -> None:
    """The delay is several times as long as a step, so it shows on any machine."""
    results = several["results"]
    steps = {name: found["steps"] for name, found in results["calibration"].items()}
    assert steps["slow"] * 3 < steps["baseline"]
    assert results["calibration"]["slow"]["same_training"]
    assert results["summary"]["slow"]["throughput"]["estimate"] < 1 / 3


def test_another_rate_is_not_the_same_training(several: dict[str, Any]) -> None:
    assert not several["results"]["calibration"]["faster"]["same_training"]


def test_a_ladder_gives_the_baseline_other_budgets(several: dict[str, Any]) -> None:
    runs = several["results"]["runs"]
    steps = {run["arm"]: run["steps"] for run in runs if run["seed"] == 1}
    assert steps["baseline"] == 4.0 / STEP
    assert steps["baseline × 0.5"] == pytest.approx(steps["baseline"] / 2, abs=1)
    assert steps["baseline × 2"] == pytest.approx(steps["baseline"] * 2, abs=1)
    assert all(run["lr_last_share"] < 0.15 for run in runs if run["arm"].startswith("baseline"))


@pytest.mark.parametrize(
    ("baseline", "recipe", "more", "message"),
    [
        (arm(), arm(val=lambda: dataset(32, 2)), {}, "validation data"),
        (arm(), arm(limit_val_batches=1), {}, "validation data"),
        (arm(), arm(train=lambda: dataset(65)), {}, "training set of 65 items"),
        (arm(), arm(), {"target": "val_f1"}, r"\['val_acc', 'val_loss'\]"),
        (arm(), arm(), {"budget": "0.001rs"}, "Raise --budget"),
        (arm(Constant), arm(), {}, "ends at 100% of its peak"),
        (arm(lambda: Small(length=10**6)), arm(), {}, "--schedule linear"),
        (arm(lambda: Small(warm_up=10**6)), arm(), {}, "too short for the schedule's warm-up"),
        (arm(lambda: Small(interval="epoch", length=10**6)), arm(), {}, "of its peak"),
    ],
)
def test_refuses_what_cannot_be_compared(tmp_path: Path, baseline, recipe, more: dict, message: str) -> None:
    with pytest.raises(Incomparable, match=message):
        bench({"recipe": recipe}, tmp_path, baseline, **more).run(progress=False, report=False)
    assert not list(tmp_path.glob("runs/*")), "refused after runs had begun"


def test_another_training_set_can_be_what_is_compared(tmp_path: Path) -> None:
    recipes = {"more": arm(train=lambda: dataset(65))}
    assert (
        bench(recipes, tmp_path, other_training_data=True).run(progress=False, report=False)["summary"]["more"]["runs"]
        == 2
    )


def test_the_bench_can_decay_the_rate_itself(tmp_path: Path) -> None:
    results = bench({"copy": arm(Constant)}, tmp_path, arm(Constant), schedule="linear").run(
        progress=False, report=False
    )
    assert all(run["lr_last_share"] < 0.1 for run in results["runs"])


def test_what_crashes_or_diverges_is_told_and_the_others_finish(tmp_path: Path) -> None:
    class Explode(Small):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1e30 if self.trainer.global_step > 3 else 1.0) ** 9

    recipes = {
        "at once": arm(callbacks=lambda: [Fail(1, RuntimeError("no such luck"))]),
        "late": arm(callbacks=lambda: [Fail(60, RuntimeError("late bad luck"))]),
        "explodes": arm(Explode),
        "good": arm(),
    }
    results = bench(recipes, tmp_path).run(progress=False, report=False)
    status = {run["arm"]: run["status"] for run in results["runs"]}
    errors = {run["arm"]: run["error"] for run in results["runs"]}
    assert status == {
        "baseline": "finished",
        "at once": "crashed",
        "late": "crashed",
        "explodes": "diverged",
        "good": "finished",
    }
    assert "in its rehearsal: RuntimeError: no such luck" in errors["at once"]
    assert errors["late"] == "RuntimeError: late bad luck"
    assert results["summary"]["late"]["verdict"] == "failed" and results["summary"]["good"]["runs"] == 2


def test_a_baseline_that_crashes_ends_the_bench(tmp_path: Path) -> None:
    broken = arm(callbacks=lambda: [Fail(1, RuntimeError("no such luck"))])
    with pytest.raises(RuntimeError, match=r"nothing to compare with: RuntimeError: no such luck"):
        bench({"good": arm()}, tmp_path, broken).run(progress=False, report=False)


def test_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """An interruption in the third run keeps the finished runs, and the others follow."""
    built = [0]

    def recipe():
        built[0] += 1
        trainer, module, data = arm(callbacks=lambda: [Fail(3, KeyboardInterrupt())] if built[0] == 6 else [])()
        return trainer, module, data

    with pytest.raises(KeyboardInterrupt):
        bench({"recipe": recipe}, tmp_path).run(progress=False, report=False)
    done = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*.json")}
    assert {file.stem for file in tmp_path.glob("runs/*")} == {
        "00-baseline-seed1",
        "01-recipe-seed1",
        "00-baseline-seed2",
    }
    results = bench({"recipe": recipe}, tmp_path).run(progress=False, report=False)
    assert len(results["runs"]) == 4 and all(run["status"] == "finished" for run in results["runs"])
    assert {file: file.stat().st_mtime_ns for file in done} == done
    again = bench({"recipe": recipe}, tmp_path).run(progress=False, report=False)
    assert again["runs"] == results["runs"] and again["calibration"] == results["calibration"]


def test_another_plan_does_not_go_on_in_the_same_folder(several: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(several["folder"], tmp_path / "copy"))
    with pytest.raises(ValueError, match=r"differs in .*seeds"):
        bench({"copy": arm()}, folder, seeds=3).run(progress=False, report=False)
    (folder / "plan.json").unlink()
    with pytest.raises(ValueError, match="other results"):
        bench({"copy": arm()}, folder).run(progress=False, report=False)


def test_prices_of_another_machine_count(several: dict[str, Any], tmp_path: Path) -> None:
    """At ten times the step cost, a budget has a tenth of the steps."""
    first = copy.deepcopy(several["results"])
    for calibration in first["calibration"].values():
        for cost in calibration["prices"]:
            cost["seconds"] *= 10
    (tmp_path / "b.json").write_text(json.dumps(first))
    second = bench({"copy": arm()}, tmp_path / "c", budget="40rs", reference=tmp_path / "b.json").run(
        progress=False, report=False
    )
    before, after = ({run["arm"]: run["steps"] for run in results["runs"]} for results in (first, second))
    assert after == {arm: before[arm] for arm in ("baseline", "copy")}


def test_a_reference_second_is_as_many_steps_in_every_bench(tmp_path: Path) -> None:
    """The baseline makes as many steps in a second bench, with another recipe."""
    file = tmp_path / "prices.json"
    more = {"seeds": 1, "reference": file, "budget": "1.5rs"}
    baseline = arm(callbacks=lambda: [Delay(0.02)])  # the longest part of a step, on a busy machine too
    first = bench({"copy": baseline}, tmp_path / "a", baseline, **more).run(progress=False, report=False)
    kept = json.loads(file.read_text())
    assert [entry["name"] for entry in kept["entries"]] == ["baseline"]
    slow = {"slow": arm(callbacks=lambda: [Delay(0.05)])}
    second = bench(slow, tmp_path / "b", baseline, **more).run(progress=False, report=False)
    assert json.loads(file.read_text()) == kept, "a price that is known was written again"
    one, two = (results["calibration"]["baseline"] for results in (first, second))
    assert one["prices"] == two["prices"] == kept["entries"][0]["prices"] and one["steps"] == two["steps"]
    assert {run["steps"] for results in (first, second) for run in results["runs"] if run["arm"] == "baseline"} == {
        first["runs"][0]["steps"]
    }
    assert second["calibration"]["slow"]["steps"] * 1.5 < two["steps"], "the recipe's price follows from its own speed"
    assert second["plan"]["reference"]


def test_controls_stand_in_for_their_techniques(tmp_path: Path) -> None:
    def gpt(*techniques):
        return lambda: (
            Trainer(accelerator="cpu", devices=1, max_steps=9, callbacks=[t() for t in techniques], logger=False),
            TinyGPT(),
        )

    recipe = gpt(
        lambda: ProgressiveStacking(stages=[(0.0, 1), (0.3, 2), (0.6, 4)]), lambda: SelectiveBackprop(keep=0.5)
    )
    arms = lay_out(("baseline", gpt()), {"both": recipe}, controls=True, ladder=[0.5])
    assert [(a.name, a.kind, a.of, a.factor) for a in arms] == [
        ("baseline", "baseline", None, 1.0),
        ("both", "recipe", None, 1.0),
        ("both: 1 block throughout", "control", "both", 1.0),
        ("both: 2 blocks throughout", "control", "both", 1.0),
        ("both: a random 50% of each batch", "control", "both", 1.0),
        ("baseline × 0.5", "ladder", None, 0.5),
    ]
    small = arms[2].build(1).trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    assert [type(c).__name__ for c in small[:2]] == ["ProgressiveStacking", "SelectiveBackprop"]
    assert small[0].stages == ((0.0, 1),) or list(small[0].stages) == [(0.0, 1)]
    assert [type(c).__name__ for c in arms[4].build(1).trainer.callbacks[:2]] == ["ProgressiveStacking", "RandomSubset"]
    assert len(lay_out(("baseline", gpt()), {"both": recipe}, controls=False, ladder=[])) == 2


@pytest.mark.parametrize("name", ["gpt2", pytest.param("vit", marks=pytest.mark.slow)])
def test_compares_recipes_on_hugging_face_models(tmp_path: Path, name: str) -> None:
    def hf(*techniques):
        def build():
            callbacks = [technique() for technique in techniques]
            trainer = Trainer(accelerator="cpu", devices=1, max_steps=9, callbacks=callbacks, logger=False)
            data = {"train_dataloaders": loader(name), "val_dataloaders": loader(name, shuffle=False)}
            return trainer, module(name), data

        return build

    grown = hf(lambda: ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)]))
    more = {"budget": "2rs", "schedule": "linear", "seeds": 1, "controls": "auto", "reference": None}
    results = bench({"grown": grown}, tmp_path, hf(), **more).run(progress=False, report=False)
    kinds = {price["kind"].split()[-1] for price in results["calibration"]["grown"]["prices"]}
    assert {kind.split(":")[1] for kind in kinds} == {"2/2", "4/4"}
    assert [run["status"] for run in results["runs"]] == ["finished"] * 3
    assert results["summary"]["grown"]["verdict"] == "no verdict", "one seed tells nothing"


@pytest.mark.parametrize(
    ("text", "seconds", "clock"),
    [("120s", 120, "wall"), ("2m", 120, "wall"), ("1.5h", 5400, "wall"), ("30rs", 30, "reference"), (7, 7, "wall")],
)
def test_budgets(text, seconds: float, clock: str) -> None:
    assert Budget.parse(text) == Budget(seconds, clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "fast", "0s", "-3s", "3 weeks", "1.2.3s"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected training seconds"):
        Budget.parse(text)


def test_a_text_without_a_unit_is_no_budget() -> None:
    with pytest.raises(
        ValueError, match=r"'4' without a unit\. Write '4s' for seconds, '4m' for minutes or '4h' for hours"
    ):
        Budget.parse("4")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seeds": [1, 1]}, "an integer and given once"),
        ({"evaluations": 1}, "evaluations=1.: expected an integer >= 2"),
        ({"schedule": "step"}, "own"),
        ({"ladder": [1.0]}, "a factor of 1 is the baseline itself"),
        ({"jobs": 2}, "functions run in this process"),
    ],
)
def test_refuses_bad_arguments(tmp_path: Path, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench({"copy": arm()}, tmp_path, **more)
    with pytest.raises(ValueError, match="Give at least one recipe"):
        bench({}, tmp_path)


def test_what_a_function_must_return(tmp_path: Path) -> None:
    with pytest.raises(Incomparable, match="a new Trainer"):
        bench({"copy": lambda: 3}, tmp_path)


@pytest.mark.parametrize(
    ("target", "mode"), [("val_loss", "min"), ("val_acc", "max"), ("val/f1", "max"), ("ppl", "min")]
)
def test_tells_whether_more_is_better(tmp_path: Path, target: str, mode: str) -> None:
    assert bench({"copy": arm()}, tmp_path, target=target).mode == mode


def test_names_of_configs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").touch()
    (tmp_path / "b.yaml").touch()
    assert named(f"{tmp_path}/a.yaml,{tmp_path}/b.yaml")[0] == "b"
    assert named(f"x={tmp_path}/a.yaml") == ("x", (f"{tmp_path}/a.yaml",))
    with pytest.raises(FileNotFoundError, match=r"there is no file .*c\.yaml"):
        named(f"{tmp_path}/a.yaml,{tmp_path}/c.yaml")
