"""``docs/evidence.md`` and the tables of ``docs/verdicts.md``, as :mod:`benchmarks.evidence` writes them from the results."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from benchmarks import evidence_further, evidence_places, evidence_settings, evidence_setup, goal
from benchmarks.evidence_arms import CLAIMS, COMPUTE, EXACT, GOAL, LEAST, SHORT, TASKS, WEIGHTS
from benchmarks.joining import together
from lightning_eff.bench.reports import findings, words
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import load

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("search_settings", "settings")  #: of the names of results of one task
SEEDS = 3  #: of an arm, where none other is told


def cell(found: dict[str, Any] | None) -> str:
    """A technique's speed-up and verdict on one task."""
    if found is None:
        return "–"
    speed = found["speedup"]
    if speed is None:
        return found["verdict"]
    seeds = len(found["final"]["values"])
    more = "" if seeds == SEEDS else f" ({seeds} seeds)"
    return f"{speed['estimate']:.2f} [{speed['low']:.2f}, {speed['high']:.2f}]{more} {found['verdict']}"


def controls(results: dict[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """A recipe's control arms and what was found of them."""
    arms = [arm["name"] for arm in results["plan"]["arms"] if arm["kind"] == "control" and arm["of"] == name]
    return [(arm.removeprefix(f"{name}: "), results["summary"][arm]) for arm in arms]


def page(
    found: dict[str, dict[str, Any]],
    tried: dict[str, dict[str, dict[str, Any]]] | None = None,
    planted: dict[str, Any] | None = None,
    weights: dict[str, dict[str, Any]] | None = None,
    compute: dict[str, dict[str, Any]] | None = None,
    shares: dict[str, dict[str, goal.Arm]] | None = None,
    others: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] | None = None,
) -> str:
    """The page.

    Args:
        found: each task's results of every technique but those of ``weights`` and ``compute``.
        tried: each task's results of the search among single techniques' settings ("search_settings") and of what won there
            ("settings").
        planted: what :mod:`benchmarks.planted` wrote.
        weights: each task's results of what moves the weights.
        compute: each task's results of what costs a step less, or has more for it.
        shares: each task's arms at all budgets, as :func:`benchmarks.goal.gathered` has them.
        others: each task's results of single techniques without a recipe, as :func:`further` has them.
    """
    lines = (ROOT / "benchmarks" / "evidence_head.md").read_text().rstrip().splitlines()
    tasks = [task for task in TASKS if task in found]
    missing = [
        TASKS[task]
        for task in TASKS
        if not any(task in part for part in (found, weights or {}, compute or {}, shares or {}))
    ]
    lines += ["", f"Tasks that have no results yet: {', '.join(missing)}."] if missing else []
    if shares:
        lines += ["", "## The time to the baseline's final loss", "", *goal_section(shares)]
    lines += ["", "## One line per technique", "", *overview(CLAIMS, found)]
    if weights:
        lines += ["", "## What moves the weights", "", *overview(WEIGHTS, weights)]
    if compute:
        lines += ["", "## What costs a step less, or has more for it", "", *overview(COMPUTE, compute)]
    for task, (results, searched) in (others or {}).items():
        lines += ["", f"## Everything else that applies: {TASKS[task]}", ""]
        lines += evidence_further.lines(task, results, searched, cell)
    for task, parts in (tried or {}).items():
        if "settings" in parts and weights:
            lines += ["", f"## Papers' settings and searched ones: {TASKS[task]}", ""]
            searched = parts.get("search_settings")
            lines += evidence_settings.lines(task, found[task], weights[task], searched, parts["settings"], cell)
    if planted is not None:
        lines += ["", "## Does the bench tell the truth?", "", *planted_section(planted)]
    for task in tasks:
        lines += [
            "",
            f"## {TASKS[task][0].upper()}{TASKS[task][1:]}",
            "",
            *section(task, found[task], f"evidence_{task}.png"),
        ]
    for task, results in (weights or {}).items():
        lines += ["", f"## What moves the weights: {TASKS[task]}", ""]
        lines += section(task, results, f"evidence_weights_{task}.png")
    for task, results in (compute or {}).items():
        lines += ["", f"## What costs a step less, or has more for it: {TASKS[task]}", ""]
        lines += section(task, results, f"evidence_compute_{task}.png")
        if counted := evidence_setup.lines(results, compiling(task)):
            lines += ["", *counted]
    if moved := evidence_places.lines(RESULTS):
        lines += ["", "## Runs on another processor", "", *moved]
    return "\n".join(lines) + "\n"


def goal_section(shares: dict[str, dict[str, goal.Arm]]) -> list[str]:
    """The shares of each task, and what is to be known of them."""
    lines = (ROOT / "benchmarks" / "evidence_goal.md").read_text().rstrip().splitlines()
    for task, arms in shares.items():
        lines += ["", *goal.lines(TASKS[task], arms, GOAL, LEAST.get(task, 60.0))]
        for name in EXACT & arms.keys():
            lines += ["", *goal.exact(name, arms[name])]
    return lines


def overview(claims: dict[str, tuple[str, str]], found: dict[str, dict[str, Any]]) -> list[str]:
    """A table with a line for each technique and each of its controls, a column for each task."""
    tasks = [task for task in TASKS if task in found]
    lines = ["| technique | " + " | ".join(TASKS[task] for task in tasks) + " | what the paper claims |"]
    lines += ["|---|" + "---|" * len(tasks) + "---|"]
    for recipe, (technique, claim) in claims.items():
        cells = [cell(found[task]["summary"].get(recipe)) for task in tasks]
        lines.append(f"| `{technique}` | " + " | ".join(cells) + f" | {claim} |")
        for control in sorted({name for task in tasks for name, _ in controls(found[task], recipe)}):
            cells = [cell(dict(controls(found[task], recipe)).get(control)) for task in tasks]
            lines.append(f"| – its control: {control} | " + " | ".join(cells) + " | |")
    return lines


def verdicts(text: str, found: dict[str, dict[str, Any]], claims: dict[str, tuple[str, str]] = CLAIMS) -> str:
    """The page with the verdicts of ``found`` in its table: the third cell of each technique's row."""
    lines = text.splitlines()
    for recipe, (technique, _) in claims.items():
        (row,) = (number for number, line in enumerate(lines) if line.startswith(f"| `{technique}` |"))
        cells = lines[row].split(" | ")
        told = [(SHORT[task], found[task]["summary"].get(recipe)) for task in TASKS if task in found]
        cells[2] = "<br>".join(f"{task} {cell(one)}" for task, one in told if one is not None) or "–"
        lines[row] = " | ".join(cells)
    return "\n".join(lines) + "\n"


def planted_section(planted: dict[str, Any]) -> list[str]:
    """What was planted, how often the intervals held it, and what the verdicts were."""
    speed, metric = planted["speed"], planted["metric"]
    apart, rates = metric["apart"]["worse rate"]["difference"], metric["rates"]
    count = min(speed["repetitions"], metric["repetitions"])
    came = ", ".join(f"{found['realised']:.3f} ({arm})" for arm, found in speed["summary"].items())
    text = (
        f"`benchmarks/planted.py`: {speed['repetitions']} benches on speed and {metric['repetitions']} on the metric, with"
        f" {speed['rounds']} rehearsals of each arm, on {speed['machine']['cpu']}. For speed, the steps of every arm take a set"
        f" share longer than they would; by the processor time of all steps the speed-ups came to {came}."
        f" For the metric, over {metric['seeds']} seeds: a twin that draws other random numbers (0 by symmetry), a twin whose"
        f" loss is lowered by a fixed amount, and a rate of {rates[1]:g} in place of {rates[0]:g}, known to be worse: measured"
        f" apart, on {metric['seeds_apart']} other seeds, its loss is {apart['mean']:+.3f} ± {apart['error']:.3f}"
        " (standard error) from the baseline's. An interval of 95 % that is right holds what was planted 19 times in 20."
    )
    if count < 20:
        text += f" {count} repetitions are too few to tell how often these do: 20 are meant."
    lines = [
        *textwrap.wrap(text, 128),
        "",
        "| arm | figure | planted | mean found | held by | mean width | verdicts |",
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
    return [*lines, "", "`tests/bench/test_calibration.py` plants speeds in synthetic times, by the hundred."]


def table(results: dict[str, Any]) -> list[str]:
    """Figures of every arm."""

    columns, rows = words.cells(results, results["summary"])
    columns = [column for column in columns if column.key not in ("throughput", "memory")]
    lines = ["| arm | " + " | ".join(column.head for column in columns) + " |", "|---|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join([row["arm"], *(row[column.key] for column in columns)]) + " |" for row in rows]


def said(task: str, results: dict[str, Any]) -> list[str]:
    """What holds of a bench as a whole: tuning, chance, prices, and what sets its arms apart beside their techniques."""

    grid = RESULTS / f"tuning_{task}.json"
    baseline = results["plan"]["arms"][0]["name"]
    tuned = results["plan"].get("tuned") or ([baseline] if grid.is_file() else None)
    plan = {**results["plan"], "tuned": tuned}
    lines = findings.lines({**results, "plan": plan}, results["summary"])
    unlike = findings.unlike(results)
    told = "; ".join(f"{row['arm']}: {row['what']} {row['own']}, the baseline's {row['baseline']}" for row in unlike)
    apart = told or "model, data, batch and rate are the baseline's in every recipe, as the configs say"
    if all(arm["kind"] != "ladder" for arm in results["plan"]["arms"]):
        lines.append(
            "The baseline was not run at other budgets on this task, so no arm's worth in its seconds is known."
        )
    return [f"- {line}" for line in [*lines, f"Beside the techniques: {apart}."]]


def section(task: str, results: dict[str, Any], picture: str) -> list[str]:
    """One task: figures of every arm, and what there is to say of each."""

    machine, plan = results["machine"], results["plan"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    versions = f"torch {machine['torch']}, Lightning {machine['lightning']}, Python {machine['python']}"
    lines = [f"{words.plan_line(results)}. {machine['cpu']}, {machine['cores']} cores{gpu}; {versions}.", ""]
    lines += [*said(task, results), ""]
    lines += [*table(results), "", f"![Speed-ups with their intervals]({picture})", ""]
    lines += [f"- {results['summary'][arm['name']]['sentence']}" for arm in plan["arms"]]
    runs = [run for run in results["runs"] if run["arm"] == "importance_sampling"]
    if steps := sum(run["steps"] for run in runs):
        share = sum(run["forward_passes"] for run in runs) / steps
        lines.append(f"- importance_sampling was on in {share:.0%} of its steps.")
    return lines


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


def in_verdicts(
    text: str,
    found: dict[str, Any],
    weights: dict[str, Any],
    compute: dict[str, Any],
    others: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] | None = None,
) -> str:
    """The page with all verdicts; of ``weights`` and ``compute``, those of techniques, which have a row there."""

    def alone(claims: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        return {recipe: told for recipe, told in claims.items() if told[0].isidentifier()}

    text = verdicts(verdicts(verdicts(text, found), weights, alone(WEIGHTS)), compute, alone(COMPUTE))
    for task, (results, searched) in (others or {}).items():
        short = f"{SHORT[task]}, {results['plan']['budget']['seconds']:g} s"
        text = evidence_further.verdicts(text, task, results, searched, short, cell)
    return text


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
