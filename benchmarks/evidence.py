"""What every technique gains on the reference tasks: run the benches, and write ``docs/evidence.md`` from their results.

    python benchmarks/evidence.py run {gpt,vit,bert,gpt2} [--budget 60rs] [--jobs 2] [--rounds 5]
    python benchmarks/evidence.py search {gpt,vit} [--seeds 0,10]
    python benchmarks/evidence.py confirm {gpt,vit} STACK
    python benchmarks/evidence.py page

``run`` holds every recipe of a task, with the controls that its techniques name, against the task's baseline, and copies
the results to ``benchmarks/results/bench_<task>.json``; interrupted, it goes on where it was. ``search`` runs every stack in
``benchmarks/<task>/stacks``, on seeds that no evaluation uses, for ``search_<task>.json``; ``confirm`` holds the chosen one
against the baseline on the evaluation's seeds, for ``stack_<task>.json``. ``page`` makes no runs; it writes the verdicts into
README's table, too.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
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


def run(task: str, options: argparse.Namespace) -> None:
    """Every recipe of the task with its controls."""
    paths = [path for recipe in CLAIMS if (path := ROOT / "benchmarks" / task / "recipes" / f"{recipe}.yaml").is_file()]
    compare(task, f"bench_{task}", paths, "3", options)
    shutil.copy(OUT / f"bench_{task}" / "figures" / "speedups.png", ROOT / "docs" / f"evidence_{task}.png")


def search(task: str, options: argparse.Namespace) -> None:
    """Every stack, without controls."""
    paths = sorted((ROOT / "benchmarks" / task / "stacks").glob("*.yaml"))
    compare(task, f"search_{task}", paths, options.seeds, options)


def confirm(task: str, options: argparse.Namespace) -> None:
    """The chosen stack, with its controls."""
    path = ROOT / "benchmarks" / task / "stacks" / f"{options.stack}.yaml"
    compare(task, f"stack_{task}", [path], "3", options)


def compare(task: str, name: str, overlays: list[Path], seeds: str, options: argparse.Namespace) -> None:
    """Hold overlays against the task's baseline, and keep the results where they are committed."""
    from lightning_eff.bench.command import main as bench

    base = ROOT / "benchmarks" / task / "baseline.yaml"
    arguments = [f"--recipe={path.stem}={base},{path}" for path in overlays]
    arguments += [f"--baseline=baseline={base}", "--target=val_loss", f"--budget={options.budget}"]
    arguments += [f"--seeds={seeds}", f"--controls={'none' if name.startswith('search') else 'auto'}", "--threads=1"]
    arguments += [f"--jobs={options.jobs}", f"--rounds={options.rounds}", f"--out={OUT / name}"]
    bench([*arguments, f"--title={TASKS[task]}", f"--ladder={options.ladder}"])
    keep(name, OUT / name)


def keep(name: str, folder: Path) -> None:
    """Copy results, without their longest lists and with paths below the repository, to where they are committed."""
    results = json.loads((folder / "results.json").read_text().replace(f"{ROOT}/", ""))
    for one in results["runs"]:
        one["losses"] = one["losses"][:: max(1, len(one["losses"]) // 20)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=0) + "\n")


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
) -> str:
    """The page.

    Args:
        found: each task's results of every technique.
        stacks: each task's results of the search for a stack ("search") and of the one that was chosen ("stack").
        planted: what :mod:`benchmarks.planted` wrote.
    """
    lines = (ROOT / "benchmarks" / "evidence_head.md").read_text().rstrip().splitlines()
    tasks = [task for task in TASKS if task in found]
    missing = [TASKS[task] for task in TASKS if task not in found]
    lines += ["", f"Tasks that have no results yet: {', '.join(missing)}."] if missing else []
    lines += ["", "## One line per technique", ""]
    lines += ["| technique | " + " | ".join(TASKS[task] for task in tasks) + " | what the paper claims |"]
    lines += ["|---|" + "---|" * len(tasks) + "---|"]
    for recipe, (technique, claim) in CLAIMS.items():
        cells = [cell(found[task]["summary"].get(recipe)) for task in tasks]
        lines.append(f"| `{technique}` | " + " | ".join(cells) + f" | {claim} |")
        for control in sorted({name for task in tasks for name, _ in controls(found[task], recipe)}):
            cells = [cell(dict(controls(found[task], recipe)).get(control)) for task in tasks]
            lines.append(f"| – its control: {control} | " + " | ".join(cells) + " | |")
    for task, parts in (stacks or {}).items():
        lines += ["", f"## The best stack for {TASKS[task]}", "", *stack_section(parts)]
    if planted is not None:
        lines += ["", "## Does the bench tell the truth?", "", *planted_section(planted)]
    for task in tasks:
        lines += [
            "",
            f"## {TASKS[task][0].upper()}{TASKS[task][1:]}",
            "",
            *section(task, found[task]),
        ]
    return "\n".join(lines) + "\n"


def readme(text: str, found: dict[str, dict[str, Any]]) -> str:
    """README with the verdicts of ``found`` in its table: the third cell of each technique's row."""
    lines = text.splitlines()
    for recipe, (technique, _) in CLAIMS.items():
        (row,) = (number for number, line in enumerate(lines) if line.startswith(f"| `{technique}` |"))
        cells = lines[row].split(" | ")
        told = [(SHORT[task], found[task]["summary"].get(recipe)) for task in TASKS if task in found]
        cells[2] = "<br>".join(f"{task} {cell(one)}" for task, one in told if one is not None)
        lines[row] = " | ".join(cells)
    return "\n".join(lines) + "\n"


def stack_section(parts: dict[str, dict[str, Any]]) -> list[str]:
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
            *table(results),
            "",
        ]
        lines += [f"- {results['summary'][arm['name']]['sentence']}" for arm in results["plan"]["arms"]]
    return lines


def planted_section(planted: dict[str, Any]) -> list[str]:
    """Copies, a planted slow-down and a planted speed-up."""
    total, verdicts, machine = planted["repetitions"], planted["verdicts"], planted["machine"]
    return [
        f"`benchmarks/planted.py`, {total} benches of {planted['budget']} a run on {machine['cpu']}: the interval of two",
        f"copies of one recipe covers 1.0 in {planted['copies_covering_1']} of {total}; a planted slow-down of a fifth is",
        f"told as slower in {verdicts['slow']['slower']}, a planted speed-up of a tenth as faster in",
        f"{verdicts['fast']['faster']}. `tests/bench/test_calibration.py` does the same with synthetic times.",
    ]


def table(results: dict[str, Any]) -> list[str]:
    """Figures of every arm."""
    from lightning_eff.bench.reports import words

    columns, rows = words.cells(results, results["summary"])
    columns = [column for column in columns if column.key not in ("throughput", "memory")]
    lines = ["| arm | " + " | ".join(column.head for column in columns) + " |", "|---|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join([row["arm"], *(row[column.key] for column in columns)]) + " |" for row in rows]


def section(task: str, results: dict[str, Any]) -> list[str]:
    """One task: figures of every arm, and what there is to say of each."""
    from lightning_eff.bench.reports import words

    machine, plan = results["machine"], results["plan"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    versions = f"torch {machine['torch']}, Lightning {machine['lightning']}, Python {machine['python']}"
    lines = [f"{words.plan_line(results)}. {machine['cpu']}, {machine['cores']} cores{gpu}; {versions}.", ""]
    lines += [*table(results), "", f"![Speed-ups with their intervals]({f'evidence_{task}.png'})", ""]
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
    ):
        runner = commands.add_parser(name, help=words)
        runner.add_argument("task", choices=TASKS)
        if command is confirm:
            runner.add_argument("stack", help="the name of a file in benchmarks/<task>/stacks")
        runner.add_argument("--budget", default="60rs")
        runner.add_argument("--jobs", type=int, default=2)
        runner.add_argument("--rounds", type=int, default=6)
        runner.add_argument("--ladder", default="1.5" if command is run else "")
        if command is search:
            runner.add_argument("--seeds", default="0,10", help="which; none of those that evaluations use")
        runner.set_defaults(run=command)
    commands.add_parser("page", help="write docs/evidence.md")
    options = parser.parse_args()
    if options.command != "page":
        options.run(options.task, options)
        return
    found, stacks, planted = committed()
    PAGE.write_text(page(found, stacks, planted))
    README.write_text(readme(README.read_text(), found))
    print(f"written: {PAGE}, {README}")


def committed() -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any] | None]:
    """What :func:`page` takes, from the results that are kept."""
    from lightning_eff.bench.reports.statistics import summarize
    from lightning_eff.bench.results import load

    def kept(name: str) -> dict[str, Any] | None:
        if not (file := RESULTS / f"{name}.json").is_file():
            return None
        results = load(file)
        return {**results, "summary": summarize(results)}

    found = {task: results for task in TASKS if (results := kept(f"bench_{task}")) is not None}
    if not found:
        sys.exit(f"no results in {RESULTS}; expected bench_<task>.json there. Make them with the command run.")
    stacks = {
        task: {part: results for part in ("search", "stack") if (results := kept(f"{part}_{task}")) is not None}
        for task in TASKS
    }
    planted = RESULTS / "planted.json"
    truth = json.loads(planted.read_text()) if planted.is_file() else None
    return found, {task: parts for task, parts in stacks.items() if parts}, truth


if __name__ == "__main__":
    main()
