"""What every technique gains on the reference tasks: run the benches, and write ``docs/evidence.md`` from their results.

    python benchmarks/evidence.py run {gpt,vit,bert,gpt2,rings,bert8k} [--set weights|compute] [--jobs 2] [--rounds 5]
    python benchmarks/evidence.py search {gpt,vit} [--seeds 0,10]
    python benchmarks/evidence.py confirm {gpt,vit} STACK
    python benchmarks/evidence.py ladder {gpt,vit,bert,rings} [--ladder 0.5,0.75,1.5]
    python benchmarks/evidence.py page

``run`` holds every recipe of a task, with the controls that its techniques name, against the task's baseline, and copies
the results to ``benchmarks/results/bench_<task>.json``; interrupted, it goes on where it was. ``--set weights`` does so for
what moves the weights (optimizers, schedules, averages), for ``weights_<task>.json``, and ``--set compute`` for what costs a
step less or has more for it, alone, with its controls and joined, for ``compute_<task>.json``. ``search`` runs every stack in
``benchmarks/<task>/stacks``, on seeds that no evaluation uses, for ``search_<task>.json``; ``confirm`` holds the chosen one
against the baseline on the evaluation's seeds, for ``stack_<task>.json``. ``ladder`` runs the baseline at other budgets, at the
prices of the committed results, for ``ladder_<task>.json``, beside those that are there; every arm's worth is told from them.
``page`` makes no runs; it writes the verdicts into README's table, too.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.evidence_page import (  # noqa: E402
    CLAIMS,
    COMPUTE,
    RESULTS,
    TASKS,
    WEIGHTS,
    committed,
    in_readme,
    page,
)
from benchmarks.joining import joined  # noqa: E402

OUT, PAGE, README = ROOT / "benchmarks" / "out", ROOT / "docs" / "evidence.md", ROOT / "README.md"
SEARCHED = ("muon", "soap", "rate_schedule")
BUDGETS = {"rings": "30rs"}  # where it is not 60 s
SETS = {"bench": CLAIMS, "weights": WEIGHTS, "compute": COMPUTE}


def run(task: str, options: argparse.Namespace) -> None:
    """Every recipe of one of the sets with its controls."""
    name = f"{options.set}_{task}"
    recipes = [recipe for recipe in SETS[options.set] if recipe in (options.only or SETS[options.set])]
    folders = [ROOT / "benchmarks" / task / kind for kind in ("recipes", "stacks", "controls")]
    found = [[path for folder in folders if (path := folder / f"{recipe}.yaml").is_file()] for recipe in recipes]
    overlays = [path for paths in found for path in paths[:1]]
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
    """The baseline alone, at other budgets, priced as in the committed results, beside those that were run before."""
    prices = next(file for part in ("bench", "compute") if (file := RESULTS / f"{part}_{task}.json").is_file())
    compare(task, f"ladder_{task}", [], "3", options, f"--reference={prices}", part=options.ladder.replace(",", "_"))


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
    # in that of what costs a language model's step less, controls are arms of their own; elsewhere techniques name theirs
    alone = name.startswith(("search", "weights")) or name in ("compute_gpt", "compute_bert8k")
    controls = "none" if alone else "auto"
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
        runner.add_argument("--budget", help="of each run (default: 60rs, 30rs for rings)")
        runner.add_argument("--jobs", type=int, default=2)
        runner.add_argument("--rounds", type=int, default=6 if command is not ladder else 2)  # a ladder needs no prices
        runner.add_argument("--ladder", default="0.5,0.75,1.5" if command in (run, ladder) else "")
        if command is search:
            runner.add_argument("--seeds", default="0,10", help="which; none of those that evaluations use")
        runner.set_defaults(run=command)
    commands.add_parser("page", help="write docs/evidence.md")
    options = parser.parse_args()
    if options.command != "page":
        options.budget = options.budget or BUDGETS.get(options.task, "60rs")
        options.run(options.task, options)
        return
    from lightning_eff.bench.reports.drawing import png
    from lightning_eff.bench.reports.figures import speedups

    found, stacks, planted, weights, compute = committed()
    PAGE.write_text(page(found, stacks, planted, weights, compute))
    for part, every in (("evidence", found), ("evidence_weights", weights), ("evidence_compute", compute)):
        for task, results in every.items():
            drawing = speedups(results, results["summary"])
            if drawing is not None:
                (ROOT / "docs" / f"{part}_{task}.png").write_bytes(png(drawing))
    README.write_text(in_readme(README.read_text(), found, weights, compute))
    print(f"written: {PAGE}, {README}")


if __name__ == "__main__":
    main()
