"""``docs/evidence.md`` and the pages in ``docs/evidence``, as :mod:`benchmarks.evidence` writes them from the results."""

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import evidence_places, evidence_setup, evidence_tasks, goal
from benchmarks.evidence_arms import CHANGES, CLAIMS, COMPUTE, GOAL, LEAST, SHORT, TASKS, WEIGHTS
from benchmarks.evidence_tasks import controls, speed, verdict
from benchmarks.joining import together
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import load

__all__ = ["CLAIMS", "COMPUTE", "GOAL", "LEAST", "SHORT", "TASKS", "WEIGHTS", "cell", "controls", "pages"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("search_settings", "settings")  #: of the names of results of one task


def cell(found: dict[str, Any] | None) -> str:
    """A technique's speed-up and verdict on one task."""
    if found is None:
        return "–"
    return verdict(found) if found["speedup"] is None else f"{speed(found)} {verdict(found)}"


def pages(
    found: dict[str, dict[str, Any]],
    tried: dict[str, dict[str, dict[str, Any]]] | None = None,
    planted: dict[str, Any] | None = None,
    weights: dict[str, dict[str, Any]] | None = None,
    compute: dict[str, dict[str, Any]] | None = None,
    shares: dict[str, dict[str, goal.Arm]] | None = None,
    others: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] | None = None,
) -> dict[str, str]:
    """The pages by their paths in ``docs``.

    Args:
        found: each task's results of the techniques in ``CLAIMS``.
        tried: each task's results of the search among single techniques' settings ("search_settings") and of what won there
            ("settings").
        planted: what :mod:`benchmarks.planted` wrote.
        weights: each task's results of optimizers, schedules and averages.
        compute: each task's results of what makes a step cheaper, or adds parameters to it.
        shares: each task's arms at all budgets, as :func:`benchmarks.goal.gathered` has them.
        others: each task's results of single techniques without a recipe, as :func:`further` has them.
    """
    every = {"bench": found, "weights": weights or {}, "compute": compute or {}}
    made = {}
    for task in TASKS:
        sets = {part: results[task] for part, results in every.items() if task in results}
        arms = (shares or {}).get(task)
        if sets or arms:
            compiled = [line for results in sets.values() for line in evidence_setup.lines(results, compiling(task))]
            other = (others or {}).get(task)
            made[f"evidence/{task}.md"] = evidence_tasks.page(
                task, sets, (tried or {}).get(task, {}), other, arms, compiled
            )
    return {"evidence.md": front(shares or {}, [*made]), **made, "evidence/method.md": method(planted)}


def front(shares: dict[str, dict[str, goal.Arm]], files: list[str]) -> str:
    """The first page: the best recipe of each task, what to take from it, and where the rest is."""
    lines = [*_text("head"), ""]
    lines += [
        "| task | fraction needed | best recipe | baseline's time | of 300 s | measured with |",
        "|---|---|---|---|---|---|",
    ]
    for task, arms in shares.items():
        for changed in (True, False):
            if (row := best(task, arms, changed)) is not None and row not in lines:
                lines.append(row)
    lines += ["", "![Seconds to the baseline's final loss](time_to_loss.svg)", "", *_text("lessons"), ""]
    lines += ["## All results", ""]
    for file in files:
        task = Path(file).stem
        lines.append(f"- [{TASKS[task][0].upper()}{TASKS[task][1:]}]({file}): {evidence_tasks.notes(task)['is']}")
    more = "how times and intervals are computed, their limits, and a check of the bench itself."
    return "\n".join([*lines, "", f"[How the evidence was measured](evidence/method.md): {more}", ""])


def best(task: str, arms: dict[str, goal.Arm], changed: bool) -> str | None:
    """The row of the recipe that needs the smallest fraction of the baseline's time.

    Args:
        task: which.
        arms: whole runs at all budgets.
        changed: whether recipes that change the model count.
    """
    budget, baseline = LEAST.get(task, 60.0), arms["baseline"]
    names = [name for name in GOAL if name in arms and (changed or name not in CHANGES)]
    how, known = "recipe at several budgets", _known(goal.share, names, arms, budget)
    if not known:
        how, known = "baseline at several budgets", _known(goal.as_good, names, arms, budget)
    if not known:
        return None
    name = min(known, key=lambda name: known[name].estimate or 0.0)
    told = GOAL[name] + (" (changes the model)" if name in CHANGES else "")
    long = goal.cell(goal.share(arms[name], baseline, 300.0))
    return f"| {TASKS[task]} | {goal.cell(known[name])} | {told} | {budget:g} s | {long} | {how} |"


def _known(
    measure: Callable[[goal.Arm, goal.Arm, float], goal.Share | None],
    names: list[str],
    arms: dict[str, goal.Arm],
    budget: float,
) -> dict[str, goal.Share]:
    """The fractions that have an interval."""
    found = {name: measure(arms[name], arms["baseline"], budget) for name in names}
    return {name: one for name, one in found.items() if one is not None and one.low is not None}


def method(planted: dict[str, Any] | None) -> str:
    """How the figures were measured, whether the bench finds what is planted, and what ran elsewhere."""
    lines = _text("method")
    if planted is not None:
        lines += ["", "## Does the bench tell the truth?", "", *planted_section(planted)]
    if moved := evidence_places.lines(RESULTS):
        lines += ["", "## Runs on another processor", "", *moved]
    return "\n".join(lines) + "\n"


def _text(name: str) -> list[str]:
    return (ROOT / "benchmarks" / f"evidence_{name}.md").read_text().rstrip().splitlines()


def planted_section(planted: dict[str, Any]) -> list[str]:
    """What was planted, how often the intervals held it, and what the verdicts were."""
    speed, metric = planted["speed"], planted["metric"]
    apart, rates = metric["apart"]["worse rate"]["difference"], metric["rates"]
    count = min(speed["repetitions"], metric["repetitions"])
    came = ", ".join(f"{found['realised']:.3f} ({arm})" for arm, found in speed["summary"].items())
    text = (
        f"`benchmarks/planted.py` plants known differences and runs the bench on them: {speed['repetitions']} times for speed"
        f" and {metric['repetitions']} times for the metric. A correct 95 % interval contains the planted value 19 times in 20."
        f" Speed: every step of an arm takes longer by a fixed fraction. Measured by processor time, the speed-ups are {came}."
        f" Metric, over {metric['seeds']} seeds: a twin with other random numbers, a twin whose loss is lowered by a fixed"
        f" amount, and a learning rate of {rates[1]:g} instead of {rates[0]:g}. On {metric['seeds_apart']} other seeds,"
        f" the last one changes the loss by {apart['mean']:+.3f} ± {apart['error']:.3f} (standard error)."
    )
    if count < 20:
        text += f" {count} repetitions are too few to judge the intervals; the check needs 20."
    lines = [
        *textwrap.wrap(text, 128),
        "",
        "| arm | figure | planted | mean measured | inside the interval | mean width | verdicts |",
        "|---|---|---|---|---|---|---|",
    ]
    words = {"speedup": "speed-up", "difference": "difference in val_loss"}
    for arm, found in (speed["summary"] | metric["summary"]).items():
        verdicts = ", ".join(f"{count} {word}" for word, count in found["verdicts"].items())
        for figure in [name for name in words if name in found]:
            one = found[figure]
            lines.append(
                f"| {arm} | {words[figure]} | {one['planted']:.3f} | {one['mean']:.3f} | {one['held']} of {one['of']} |"
                f" {one['mean_width']:.3f} | {verdicts} |"
            )
    return [*lines, "", "`tests/bench/test_calibration.py` repeats this on synthetic times."]


def compiling(task: str) -> dict[str, Any] | None:
    """What ``benchmarks/compile_time.py`` wrote of a task, where it did."""
    file = RESULTS / "compile_time.json"
    measured = json.loads(file.read_text()) if file.is_file() else None
    return measured if measured is not None and measured["task"] == task else None


def further() -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """By task, the kept results of single techniques without a recipe, and those of the search among their settings."""
    every = {}
    for task in TASKS:
        if kept := [*RESULTS.glob(f"further_{task}.json"), *RESULTS.glob(f"further_{task}_[0-9]*.json")]:
            results = [load(file) for file in (kept[0], RESULTS / f"search_further_{task}.json") if file.is_file()]
            told = [{**one, "summary": summarize(one)} for one in results]
            every[task] = (told[0], told[1] if len(told) > 1 else None)
    return every


def committed() -> tuple[
    dict[str, Any],
    dict[str, dict[str, Any]],
    dict[str, Any] | None,
    dict[str, Any],
    dict[str, Any],
    dict[str, dict[str, goal.Arm]],
]:
    """What :func:`page` takes, from the results that are kept."""

    def kept(name: str) -> dict[str, Any] | None:
        if not (file := RESULTS / f"{name}.json").is_file():
            return None
        results = load(file)
        return {**results, "summary": summarize(results)}

    def laddered(part: str, task: str) -> dict[str, Any] | None:
        results, ladder = kept(f"{part}_{task}"), kept(f"ladder_{task}")
        if results is None:
            return None
        results = together(results, ladder)
        return {**results, "summary": summarize(results)}

    found = {task: results for task in TASKS if (results := laddered("bench", task)) is not None}
    if not found:
        sys.exit(f"no results in {RESULTS}; expected bench_<task>.json there. Make them with the command run.")
    tried = {
        task: {part: results for part in PARTS if (results := kept(f"{part}_{task}")) is not None} for task in TASKS
    }
    planted = RESULTS / "planted.json"
    truth = json.loads(planted.read_text()) if planted.is_file() else None
    weights = {task: results for task in TASKS if (results := laddered("weights", task)) is not None}
    compute = {task: results for task in TASKS if (results := laddered("compute", task)) is not None}
    arms = {task: goal.gathered(goal.read(task, RESULTS)) for task in TASKS}
    shares = {task: of for task, of in arms.items() if GOAL.keys() & of.keys()}
    return found, {task: parts for task, parts in tried.items() if parts}, truth, weights, compute, shares
