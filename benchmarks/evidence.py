"""Measure the gain of every technique on the reference tasks, and write the pages of evidence from the results.

    python benchmarks/evidence.py run {gpt,vit,bert,gpt2,rings,bert8k,gpt256,trained} [--set weights|compute|goal|further]
        [--jobs 2] [--only NAME ...] [--seeds 4,5] [--rounds 5] [--reference benchmarks/results/weights_gpt.json]
        [--unit benchmarks/results/further_gpt_30.json] [--processor-time]
    python benchmarks/evidence.py search {gpt,vit,bert} [--set further] [--seeds 0,10] [--budget 30rs]
    python benchmarks/evidence.py ladder {gpt,vit,bert,rings,bert8k,gpt256} [--ladder 0.5,0.75,1.5] [--of STACK]
        [--budget 300rs]
    python benchmarks/evidence.py page

``run`` compares every recipe of a task, and the controls of its techniques, with the task's baseline. It copies the results to
``benchmarks/results/bench_<task>.json``, and continues after an interruption. Other sets have other files:

- ``--set weights``: optimizers, schedules and averages, in ``weights_<task>.json``.
- ``--set compute``: techniques that change the step cost, alone, with their controls, and combined, in
  ``compute_<task>.json``.
- ``--set settings``: the winners of ``search``.
- ``--set further``: single techniques without a recipe, from ``benchmarks/further.yaml``.
- ``--set goal``: the fastest stacks to the baseline's final loss.

``--only`` runs a part of a set, and keeps the other results. With ``--reference`` and the committed file it uses the step costs
in that file, and adds the results of further ``--seeds``. With ``--unit`` and the committed file, the baseline's step costs in
that file count, whichever processor measured them. Use it to add further arms on another processor, with
seeds that the file does not have. Their step costs relative to the baseline's are then measured there. ``--processor-time``
measures these in processor time, for a machine that other programs keep busy. With ``--of`` a stack stands in the place of the
baseline, to measure what one technique more adds to it.

``search`` runs recipes of single techniques and other settings of them, from ``benchmarks/<task>/settings``, for
``search_settings_<task>.json``. It uses seeds that no evaluation uses.

``ladder`` runs the baseline at other budgets with the committed step costs, and adds the results to ``ladder_<task>.json``. The
value of every arm is computed from them. ``ladder --of`` runs a stack of ``--set goal`` instead, with that bench's step costs.
With ``--budget``, ``run --set goal`` and ``ladder`` write to a file with the budget in its name.

``page`` runs nothing. It writes ``docs/evidence.md``, ``docs/evidence/`` and their pictures.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import evidence_further, evidence_page, goal, processor_time  # noqa: E402
from benchmarks.evidence_arms import CLAIMS, COMPUTE, GOAL, SETTINGS, TASKS, WEIGHTS, settings  # noqa: E402
from benchmarks.evidence_page import RESULTS, committed, pages  # noqa: E402
from benchmarks.evidence_places import unit  # noqa: E402
from benchmarks.evidence_settings import to_confirm  # noqa: E402
from benchmarks.joining import together  # noqa: E402

OUT, DOCS = ROOT / "benchmarks" / "out", ROOT / "docs"
SEARCHED = ("muon", "soap", "schedule_free", "moving_average", "batch_warmup", "rate_schedule")
BUDGET, BUDGETS = "60rs", {"gpt256": "150rs", "trained": "30rs"}
SETS = {"bench": CLAIMS, "weights": WEIGHTS, "compute": COMPUTE, "goal": GOAL, "settings": settings(), "further": ()}


def run(task: str, options: argparse.Namespace) -> None:
    """Every recipe of one of the sets with its controls."""
    if options.of and options.unit:
        raise SystemExit("--unit: it has the step costs of the baseline, and --of another one. Leave one of them out.")
    name = f"beside_{options.of}" if options.of else options.set
    name = f"{name}_{task}{at(task, options.budget)}"
    wanted = options.only or SETS[options.set]
    file = RESULTS / f"search_{options.set}_{task}.json"
    searched = json.loads(file.read_text()) if file.is_file() else None
    if options.set == "settings" and not options.only and searched is not None:
        wanted = to_confirm(searched)
    if options.seeds != "3":  # further seeds: a ladder would have these alone
        options.ladder = ""
    if options.set == "further":
        wanted = options.only or evidence_further.to_run(evidence_further.settings(task), searched)
        overlays = evidence_further.overlays(task, wanted, OUT / "overlays" / task)
    else:
        folders = [ROOT / "benchmarks" / task / kind for kind in ("recipes", "stacks", "controls", "settings")]
        recipes = [recipe for recipe in SETS[options.set] if recipe in wanted]
        found = [[path for folder in folders if (path := folder / f"{recipe}.yaml").is_file()] for recipe in recipes]
        overlays = [path for paths in found for path in paths[:1]]
    part = short("_".join([*(options.only or ()), *further(options.seeds)]))
    compare(task, name, overlays, options.seeds, options, part=part)


def search(task: str, options: argparse.Namespace) -> None:
    """Other settings of each technique beside its recipe, or all of those that have none, without controls."""
    folder = ROOT / "benchmarks" / task
    if options.set == "further":
        every = evidence_further.settings(task)
        wanted = options.only or [one.name for one in every]
        part = short("_".join(options.only or ()))
        overlays = evidence_further.overlays(task, wanted, OUT / "overlays" / task)
        compare(task, f"search_further_{task}", overlays, options.seeds, options, part=part)
        return
    paths = [folder / "recipes" / f"{recipe}.yaml" for recipe in SETTINGS]
    paths += [folder / "settings" / f"{one}.yaml" for of in SETTINGS.values() for one in of]
    if not (folder / "settings").is_dir():
        raise SystemExit(f"{task} has no other settings: expected overlays in {folder / 'settings'}, as gpt has them.")
    compare(task, f"search_settings_{task}", [path for path in paths if path.is_file()], options.seeds, options)


def ladder(task: str, options: argparse.Namespace) -> None:
    """The baseline alone, or a stack, at other budgets, priced as in the committed results, beside those of earlier calls."""
    parts = ("goal", "compute", "weights") if options.of else ("bench", "compute")
    kept, name = goal.files(task, RESULTS, parts), options.of or "baseline"
    prices = next((file for file in kept if name in json.loads(file.read_text())["calibration"]), None)
    if prices is None:
        raise SystemExit(f"no bench of {task} in {RESULTS} has prices of {name}; run one first.")
    name = f"ladder_{task}{at(task, options.budget)}" + (f"_{options.of}" if options.of else "")
    part = "_".join([options.ladder.replace(",", "_"), *further(options.seeds)])
    compare(task, name, [], options.seeds, options, f"--reference={prices}", part=part)


def short(name: str) -> str:
    """A name that a folder can have: of a long one, a digest."""
    return name if len(name) <= 150 else hashlib.sha256(name.encode()).hexdigest()[:12]


def further(seeds: str) -> list[str]:
    """What a folder of runs is named by beside its arms: nothing for the first three seeds."""
    return [] if seeds == "3" else [f"seeds_{seeds}"]


def at(task: str, budget: str) -> str:
    """What the results of a budget are named by: nothing for that of the task."""
    return "" if budget == BUDGETS.get(task, BUDGET) else f"_{budget.removesuffix('rs')}"


def compare(
    task: str, name: str, overlays: list[Path], seeds: str, options: argparse.Namespace, *more: str, part: str = ""
) -> None:
    """Hold overlays against the task's baseline, and keep the results where they are committed: those of a part by joining."""
    from lightning_eff.bench.command import main as bench

    if getattr(options, "processor_time", False):
        processor_time.rehearse()
    out = OUT / (f"{name}-{part}" if part else name)
    base = ROOT / "benchmarks" / task / "baseline.yaml"
    arguments = [f"--recipe={path.stem}={base},{path}" for path in overlays]
    of = getattr(options, "of", None)
    own = [file for kind in ("stacks", "recipes") if (file := base.parent / kind / f"{of}.yaml").is_file()]
    if of and not own:
        raise SystemExit(f"--of {of}: no {of}.yaml in {base.parent / 'stacks'} nor in {base.parent / 'recipes'}.")
    first = ",".join(map(str, [base, *own[:1]]))
    arguments += [f"--baseline={of or 'baseline'}={first}", "--target=val_loss", f"--budget={options.budget}"]
    # in the set of what moves the weights, the baseline is the control: what they leave to its optimizer keeps its rate
    # in that of what costs a language model's step less, controls are arms of their own; elsewhere techniques name theirs
    parts = "search", "weights", "goal", "settings", "further", "beside"
    alone = name.startswith(parts) or name in ("compute_gpt", "compute_bert8k")
    controls = "none" if alone else "auto"
    arguments += [f"--seeds={seeds}", f"--controls={controls}", "--threads=1"]
    arguments += [f"--jobs={options.jobs}", f"--rounds={options.rounds}", f"--out={out}"]
    if overlays:
        tuned = [of or "baseline", *(path.stem for path in overlays if path.stem in SEARCHED)]
        prices = OUT / f"prices_{name}.json" if of else RESULTS / "prices.json"
        prices = unit(options.unit, base, OUT / f"unit_{name}.json") if options.unit else prices
        arguments += [f"--tuned={','.join(tuned)}", f"--reference={options.reference or prices}"]
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
        results = together(json.loads(file.read_text()), results)
        results["summary"] = summarize(results)
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=0) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words, command in (
        ("run", "every recipe of a task", run),
        ("search", "other settings of a task's techniques, once", search),
        ("ladder", "the baseline of a task at other budgets", ladder),
    ):
        runner = commands.add_parser(name, help=words)
        runner.add_argument("task", choices=TASKS)
        if command is run:
            runner.add_argument("--set", choices=SETS, default="bench", help="which recipes")
            runner.add_argument("--only", nargs="+", help="of the set, these recipes alone")
            runner.add_argument("--seeds", default="3", help="how many, or which, beside those that are there")
            runner.add_argument("--of", help="a stack or recipe of the task, in the place of the baseline")
            what = "whose prices count (default: benchmarks/results/prices.json, the baseline's)"
            runner.add_argument("--reference", type=Path, help=what)
        if command is not ladder:
            runner.add_argument("--processor-time", action="store_true", help="rehearse in processor time")
            runner.add_argument("--unit", type=Path, help="results whose baseline's step costs count, of any processor")
        runner.add_argument("--budget", help="of each run (default: 60rs, 150rs for gpt256, 30rs for trained)")
        runner.add_argument("--jobs", type=int, default=2)
        runner.add_argument("--rounds", type=int, default=6 if command is not ladder else 2)  # a ladder needs no prices
        runner.add_argument("--ladder", default="0.5,0.75,1.5" if command in (run, ladder) else "")
        if command is search:
            runner.add_argument("--seeds", default="0,10", help="which; none of those that evaluations use")
            runner.add_argument("--set", choices=("settings", "further"), default="settings", help="of which recipes")
            runner.add_argument("--only", nargs="+", help="of the set further, these settings alone")
        if command is ladder:
            runner.add_argument("--seeds", default="3", help="how many, or which")
            runner.add_argument("--of", help="a file in benchmarks/<task>/stacks, in the place of the baseline")
        runner.set_defaults(run=command, reference=None)
    commands.add_parser("page", help="write docs/evidence.md and docs/evidence/")
    options = parser.parse_args()
    if options.command != "page":
        options.budget = options.budget or BUDGETS.get(options.task, BUDGET)
        options.run(options.task, options)
        return
    from lightning_eff.bench.reports.drawing import png
    from lightning_eff.bench.reports.figures import speedups

    found, tried, planted, weights, compute, shares = committed()
    others = evidence_page.further()
    made = pages(found, tried, planted, weights, compute, shares, others)
    for name, text in made.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)
    for part, every in (("evidence", found), ("evidence_weights", weights), ("evidence_compute", compute)):
        for task, results in every.items():
            drawing = speedups(results, results["summary"])
            if drawing is not None:
                (ROOT / "docs" / f"{part}_{task}.png").write_bytes(png(drawing))
    print(f"wrote {', '.join(f'docs/{name}' for name in made)}")


if __name__ == "__main__":
    main()
