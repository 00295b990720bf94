"""What every technique gains on the reference tasks: run the benches, and write ``docs/evidence.md`` from their results.

    python benchmarks/evidence.py run {gpt,vit,bert,gpt2} [--set weights] [--budget 60rs] [--jobs 2] [--rounds 5]
    python benchmarks/evidence.py search {gpt,vit} [--seeds 0,10]
    python benchmarks/evidence.py confirm {gpt,vit} STACK
    python benchmarks/evidence.py ladder {gpt,vit,bert} [--ladder 0.5,0.75,1.5]
    python benchmarks/evidence.py page

``run`` holds every recipe of a task, with the controls that its techniques name, against the task's baseline, and copies
the results to ``benchmarks/results/bench_<task>.json``; interrupted, it goes on where it was. ``--set weights`` does so for
what moves the weights (optimizers, schedules, averages), for ``weights_<task>.json``. ``search`` runs every stack in
``benchmarks/<task>/stacks``, on seeds that no evaluation uses, for ``search_<task>.json``; ``confirm`` holds the chosen one
against the baseline on the evaluation's seeds, for ``stack_<task>.json``. ``ladder`` runs the baseline at other budgets, at the
prices of the committed results, for ``ladder_<task>.json``, from which every arm's worth is told. ``page`` makes no runs; it
writes the verdicts into README's table, too.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.joining import joined  # noqa: E402

RESULTS, OUT, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "out", ROOT / "docs" / "evidence.md"
README = ROOT / "README.md"
TASKS = {
    "gpt": "GPT on source text",
    "vit": "ViT on noisy digits",
    "bert": "masked language model on source text",
    "gpt2": "GPT-2 124M on source text, one GPU",
}

SHORT = {"gpt": "GPT", "vit": "ViT", "bert": "MLM", "gpt2": "GPT-2"}

# Recipe, technique, and what its paper claimed: of their models and budgets, not of these.
CLAIMS = {
    "stacking": (
        "ProgressiveStacking",
        "about 25 % less time for BERT (Gong et al. 2019); 54.6 % fewer tokens to the same loss at 7B (Du et al. 2024)",
    ),
    "length_warmup": (
        "SequenceLengthWarmup",
        "1.65 times as fast (Press et al. 2020); GPT-2 3.3 times, at 8 times the batch (Li et al. 2021)",
    ),
    "averaging": (
        "LatestWeightAveraging",
        "68 GPU-hours of ResNet-50 and 30 of RoBERTa saved, before the rate is decayed (Kaddour 2022)",
    ),
    "sharpness": (
        "SharpnessAwareMinimization",
        "+0.4 to +1.9 points of ImageNet accuracy at twice the time of a step (Foret et al. 2020)",
    ),
    "importance_sampling": (
        "ImportanceSampling",
        "lower training loss at equal time, up to an order of magnitude (Katharopoulos & Fleuret 2018)",
    ),
    "selective_backprop": ("SelectiveBackprop", "up to 3.5 times as fast to a target (Jiang et al. 2019)"),
    "layer_dropping": ("ProgressiveLayerDropping", "24 % less time at equal samples (Zhang & He 2020)"),
}

# The same of what moves the weights: their settings were searched on the search's own seed.
WEIGHTS = {
    "muon": (
        "Muon",
        "1.35 times fewer tokens than AdamW to a loss (Jordan et al. 2024); at most 1.4 times as fast as tuned AdamW at 0.1B,"
        " 1.1 at 1.2B (Wen et al. 2025)",
    ),
    "soap": ("SOAP", "40 % fewer steps and 35 % less time than AdamW, at 360M and 660M (Vyas et al. 2024)"),
    "schedule_free": (
        "ScheduleFree",
        "as good as a tuned schedule, without one (Defazio et al. 2024); first of AlgoPerf's self-tuning track, v0.5",
    ),
    "moving_average": ("ExponentialMovingAverage", "30 of 2750 steps by a blended tail (modded-nanogpt's records)"),
    "batch_warmup": (
        "BatchSizeWarmup",
        "fewer updates at equal epochs (Smith et al. 2017); about 2 % of the time (modded-nanogpt's records)",
    ),
    "rate_schedule": (
        "LearningRateSchedule",
        "a decay over the true budget is what others must beat (Kaddour et al. 2023)",
    ),
}
SEARCHED = ("muon", "soap", "rate_schedule")
SETS = {"bench": CLAIMS, "weights": WEIGHTS}


def run(task: str, options: argparse.Namespace) -> None:
    """Every recipe of one of the sets with its controls."""
    folder, name = ROOT / "benchmarks" / task / "recipes", f"{options.set}_{task}"
    recipes = [recipe for recipe in SETS[options.set] if recipe in (options.only or SETS[options.set])]
    overlays = [path for recipe in recipes if (path := folder / f"{recipe}.yaml").is_file()]
    compare(task, name, overlays, "3", options, part="_".join(options.only or ()))


def search(task: str, options: argparse.Namespace) -> None:
    """Every stack, without controls."""
    paths = sorted((ROOT / "benchmarks" / task / "stacks").glob("*.yaml"))
    compare(task, f"search_{task}", paths, options.seeds, options)


def confirm(task: str, options: argparse.Namespace) -> None:
    """The chosen stack, with its controls."""
    path = ROOT / "benchmarks" / task / "stacks" / f"{options.stack}.yaml"
    compare(task, f"stack_{task}", [path], "3", options)


def ladder(task: str, options: argparse.Namespace) -> None:
    """The baseline alone, at other budgets, priced as in the committed results."""
    compare(task, f"ladder_{task}", [], "3", options, f"--reference={RESULTS / f'bench_{task}.json'}")


def compare(
    task: str, name: str, overlays: list[Path], seeds: str, options: argparse.Namespace, *more: str, part: str = ""
) -> None:
    """Hold overlays against the task's baseline, and keep the results where they are committed: those of a part by joining."""
    from lightning_eff.bench.command import main as bench

    out = OUT / (f"{name}-{part}" if part else name)
    base = ROOT / "benchmarks" / task / "baseline.yaml"
    arguments = [f"--recipe={path.stem}={base},{path}" for path in overlays]
    arguments += [f"--baseline=baseline={base}", "--target=val_loss", f"--budget={options.budget}"]
    # in the set of what moves the weights, the baseline is the control: what they leave to its optimizer keeps its rate
    controls = "none" if name.startswith(("search", "weights")) else "auto"
    arguments += [f"--seeds={seeds}", f"--controls={controls}", "--threads=1"]
    arguments += [f"--jobs={options.jobs}", f"--rounds={options.rounds}", f"--out={out}"]
    if overlays:
        tuned = ["baseline", *(path.stem for path in overlays if path.stem in SEARCHED)]
        arguments += [f"--tuned={','.join(tuned)}", f"--reference={RESULTS / 'prices.json'}"]
    bench([*arguments, f"--title={TASKS[task]}", f"--ladder={options.ladder}", *more])
    keep(name, out, join=bool(part))


def keep(name: str, folder: Path, *, join: bool = False) -> None:
    """Copy results, without their longest lists and with paths below the repository, to where they are committed.

    Args:
        name: of the committed file.
        folder: of the bench.
        join: leave the arms of the committed file that the bench does not have.
    """
    from lightning_eff.bench.reports.statistics import summarize

    results = json.loads((folder / "results.json").read_text().replace(f"{ROOT}/", ""))
    for one in results["runs"]:
        one["losses"] = one["losses"][:: max(1, len(one["losses"]) // 20)]
    file = RESULTS / f"{name}.json"
    if join and file.is_file():
        results = joined(json.loads(file.read_text()), results)
        results["summary"] = summarize(results)
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=0) + "\n")


def cell(found: dict[str, Any] | None) -> str:
    """A technique's speed-up and verdict on one task."""
    if found is None:
        return "–"
    speed = found["speedup"]
    if speed is None:
        return found["verdict"]
    return f"{speed['estimate']:.2f} [{speed['low']:.2f}, {speed['high']:.2f}] {found['verdict']}"


def controls(results: dict[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """A recipe's control arms and what was found of them."""
    arms = [arm["name"] for arm in results["plan"]["arms"] if arm["kind"] == "control" and arm["of"] == name]
    return [(arm.removeprefix(f"{name}: "), results["summary"][arm]) for arm in arms]


def page(
    found: dict[str, dict[str, Any]],
    stacks: dict[str, dict[str, dict[str, Any]]] | None = None,
    planted: dict[str, Any] | None = None,
    weights: dict[str, dict[str, Any]] | None = None,
) -> str:
    """The page.

    Args:
        found: each task's results of every technique but those of ``weights``.
        stacks: each task's results of the search for a stack ("search") and of the one that was chosen ("stack").
        planted: what :mod:`benchmarks.planted` wrote.
        weights: each task's results of what moves the weights.
    """
    lines = (ROOT / "benchmarks" / "evidence_head.md").read_text().rstrip().splitlines()
    tasks = [task for task in TASKS if task in found]
    missing = [TASKS[task] for task in TASKS if task not in found]
    lines += ["", f"Tasks that have no results yet: {', '.join(missing)}."] if missing else []
    lines += ["", "## One line per technique", "", *overview(CLAIMS, found)]
    if weights:
        lines += ["", "## What moves the weights", "", *overview(WEIGHTS, weights)]
    for task, parts in (stacks or {}).items():
        lines += ["", f"## The best stack for {TASKS[task]}", "", *stack_section(task, parts)]
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
    return "\n".join(lines) + "\n"


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


def readme(text: str, found: dict[str, dict[str, Any]], claims: dict[str, tuple[str, str]] = CLAIMS) -> str:
    """README with the verdicts of ``found`` in its table: the third cell of each technique's row."""
    lines = text.splitlines()
    for recipe, (technique, _) in claims.items():
        (row,) = (number for number, line in enumerate(lines) if line.startswith(f"| `{technique}` |"))
        cells = lines[row].split(" | ")
        told = [(SHORT[task], found[task]["summary"].get(recipe)) for task in TASKS if task in found]
        cells[2] = "<br>".join(f"{task} {cell(one)}" for task, one in told if one is not None) or "–"
        lines[row] = " | ".join(cells)
    return "\n".join(lines) + "\n"


def stack_section(task: str, parts: dict[str, dict[str, Any]]) -> list[str]:
    """The search among stacks, and the chosen one against the baseline."""
    lines: list[str] = []
    if (results := parts.get("search")) is not None:
        seeds = results["plan"]["seeds"]
        lines += [
            f"Searched on seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, which no evaluation uses.",
            "So few runs decide nothing but an order of final losses; the first in it was chosen.",
            "",
            *table(results),
        ]
    if (results := parts.get("stack")) is not None:
        from lightning_eff.bench.reports import words

        lines += [
            "",
            f"The chosen one, held against the baseline: {words.plan_line(results)}.",
            "",
            *said(task, results, searched=True),
            "",
            *table(results),
            "",
        ]
        lines += [f"- {results['summary'][arm['name']]['sentence']}" for arm in results["plan"]["arms"]]
    return lines


def planted_section(planted: dict[str, Any]) -> list[str]:
    """What was planted, how often the intervals held it, and what the verdicts were."""
    machine, apart, told = planted["machine"], planted["apart"]["worse rate"]["difference"], planted["summary"]
    spent = ", ".join(f"{name} {share:.3f}" for name, share in planted["spent"].items())
    rates = planted["rates"]
    text = (
        f"`benchmarks/planted.py`, {planted['repetitions']} repetitions of two benches with {planted['rounds']} rehearsals of"
        f" each arm, on {machine['cpu']}, which other processes kept busy. For speed, the steps of every arm take a set share"
        f" longer than they would; what that came to, in times of a plain step's processor time: {spent}. For the metric, over"
        f" {planted['seeds']} seeds: a twin that draws other random numbers (0 by symmetry), a twin whose loss is lowered by a"
        f" fixed amount, and a rate of {rates[1]:g} in place of {rates[0]:g}, known to be worse: measured apart, on"
        f" {planted['seeds_apart']} other seeds, its loss is {apart['mean']:+.3f} ± {apart['error']:.3f} (standard error) from"
        " the baseline's. An interval of 95 % that is right holds what was planted 19 times in 20."
    )
    if planted["repetitions"] < 20:
        text += f" {planted['repetitions']} repetitions are too few to tell how often these do: 20 are meant, and not yet run."
    lines = [
        *textwrap.wrap(text, 128),
        "",
        "| arm | figure | planted | mean found | held by | mean width | verdicts |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, found in told.items():
        verdicts = ", ".join(f"{count} {word}" for word, count in found["verdicts"].items())
        for figure in [name for name in ("speedup", "difference") if name in found]:
            one = found[figure]
            lines.append(
                f"| {arm} | {'speed-up' if figure == 'speedup' else 'difference in val_loss'} | {one['planted']:.3f} |"
                f" {one['mean']:.3f} | {one['held']} of {one['of']} | {one['mean_width']:.3f} | {verdicts} |"
            )
    return [*lines, "", "`tests/bench/test_calibration.py` plants speeds in synthetic times, by the hundred."]


def table(results: dict[str, Any]) -> list[str]:
    """Figures of every arm."""
    from lightning_eff.bench.reports import words

    columns, rows = words.cells(results, results["summary"])
    columns = [column for column in columns if column.key not in ("throughput", "memory")]
    lines = ["| arm | " + " | ".join(column.head for column in columns) + " |", "|---|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join([row["arm"], *(row[column.key] for column in columns)]) + " |" for row in rows]


def said(task: str, results: dict[str, Any], *, searched: bool = False) -> list[str]:
    """What holds of a bench as a whole: tuning, chance, prices, and what sets its arms apart beside their techniques.

    Args:
        task: its name.
        results: with their summary.
        searched: the recipe was chosen among several, so that it is neither tuned nor untuned.
    """
    from lightning_eff.bench.reports import findings

    grid = RESULTS / f"tuning_{task}.json"
    baseline = results["plan"]["arms"][0]["name"]
    tuned = results["plan"].get("tuned") or ([baseline] if grid.is_file() else None)
    plan = {**results["plan"], "tuned": None if searched else tuned}
    lines = findings.lines({**results, "plan": plan}, results["summary"])
    unlike = findings.unlike(results)
    told = "; ".join(f"{row['arm']}: {row['what']} {row['own']}, the baseline's {row['baseline']}" for row in unlike)
    apart = told or "model, data, batch and rate are the baseline's in every recipe, as the configs say"
    if all(arm["kind"] != "ladder" for arm in results["plan"]["arms"]) and not searched:
        lines.append(
            "The baseline was not run at other budgets on this task, so no arm's worth in its seconds is known."
        )
    return [f"- {line}" for line in [*lines, f"Beside the techniques: {apart}."]]


def section(task: str, results: dict[str, Any], picture: str) -> list[str]:
    """One task: figures of every arm, and what there is to say of each."""
    from lightning_eff.bench.reports import words

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words, command in (
        ("run", "every recipe of a task", run),
        ("search", "every stack of a task, once", search),
        ("confirm", "the chosen stack of a task", confirm),
        ("ladder", "the baseline of a task at other budgets", ladder),
    ):
        runner = commands.add_parser(name, help=words)
        runner.add_argument("task", choices=TASKS)
        if command is run:
            runner.add_argument("--set", choices=SETS, default="bench", help="which recipes")
            runner.add_argument("--only", nargs="+", help="of the set, these recipes alone")
        if command is confirm:
            runner.add_argument("stack", help="the name of a file in benchmarks/<task>/stacks")
        runner.add_argument("--budget", default="60rs")
        runner.add_argument("--jobs", type=int, default=2)
        runner.add_argument("--rounds", type=int, default=6 if command is not ladder else 2)  # a ladder needs no prices
        runner.add_argument("--ladder", default="0.5,0.75,1.5" if command in (run, ladder) else "")
        if command is search:
            runner.add_argument("--seeds", default="0,10", help="which; none of those that evaluations use")
        runner.set_defaults(run=command)
    commands.add_parser("page", help="write docs/evidence.md")
    options = parser.parse_args()
    if options.command != "page":
        options.run(options.task, options)
        return
    from lightning_eff.bench.reports.drawing import png
    from lightning_eff.bench.reports.figures import speedups

    found, stacks, planted, weights = committed()
    PAGE.write_text(page(found, stacks, planted, weights))
    for part, every in (("evidence", found), ("evidence_weights", weights)):
        for task, results in every.items():
            drawing = speedups(results, results["summary"])
            if drawing is not None:
                (ROOT / "docs" / f"{part}_{task}.png").write_bytes(png(drawing))
    README.write_text(readme(readme(README.read_text(), found), weights, WEIGHTS))
    print(f"written: {PAGE}, {README}")


def committed() -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any] | None, dict[str, Any]]:
    """What :func:`page` takes, from the results that are kept."""
    from lightning_eff.bench.reports.statistics import summarize
    from lightning_eff.bench.results import load

    def kept(name: str) -> dict[str, Any] | None:
        if not (file := RESULTS / f"{name}.json").is_file():
            return None
        results = load(file)
        return {**results, "summary": summarize(results)}

    def laddered(part: str, task: str) -> dict[str, Any] | None:
        results, ladder = kept(f"{part}_{task}"), kept(f"ladder_{task}")
        if results is None:
            return None
        results = joined(results, ladder)
        return {**results, "summary": summarize(results)}

    found = {task: results for task in TASKS if (results := laddered("bench", task)) is not None}
    if not found:
        sys.exit(f"no results in {RESULTS}; expected bench_<task>.json there. Make them with the command run.")
    stacks = {
        task: {part: results for part in ("search", "stack") if (results := kept(f"{part}_{task}")) is not None}
        for task in TASKS
    }
    planted = RESULTS / "planted.json"
    truth = json.loads(planted.read_text()) if planted.is_file() else None
    weights = {task: results for task in TASKS if (results := laddered("weights", task)) is not None}
    return found, {task: parts for task, parts in stacks.items() if parts}, truth, weights


if __name__ == "__main__":
    main()
