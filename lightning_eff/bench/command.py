"""``lightning-eff bench``: run a benchmark over configs, draw its report again, or set two beside each other."""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_eff._errors import Arguments, told

_DESCRIPTION = """\
Does a recipe pay, by how much, and how sure is that? Trains a baseline and recipes in turns over the same budget of
training seconds, with the learning rate decayed wholly over it, on the same data order for each seed.

  lightning-eff bench --baseline a.yaml --recipe b.yaml --target val_loss --budget 120s --seeds 3
  lightning-eff bench report DIR        draw the report of a bench again
  lightning-eff bench compare A B       set two benches side by side
"""


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    options = Arguments(
        "lightning-eff bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    configs = "[name=]config.yaml[,more.yaml]; several are merged from left to right, as LightningCLI merges them"
    add("--baseline", required=True, metavar="CONFIGS", help=configs)
    add("--recipe", required=True, action="append", metavar="CONFIGS", help="the same; repeat it for more recipes")
    add("--target", required=True, metavar="METRIC", help="what validation_step logs, such as val_loss")
    add("--mode", choices=("min", "max"), help="whether less or more of it is better; told by its name otherwise")
    add(
        "--budget",
        required=True,
        help="training seconds of each run: 120s, 2m or 1h of wall-clock; 120rs in reference-system time, where each"
        " step costs the calibrated time of its kind, so that a busy machine does not matter",
    )
    add("--seeds", default="3", help="how many, or which: 3, or 5,6,7, or 7, for that one alone (default: 3)")
    add(
        "--out",
        type=Path,
        help="folder for the results; an interrupted bench goes on there (default: lightning_logs/bench)",
    )
    add("--controls", choices=("auto", "none"), default="auto", help="add the control that each technique names")
    add(
        "--ladder",
        default="",
        metavar="F,F",
        help="run the baseline also at these factors of the budget, e.g. 0.67,1.5",
    )
    add("--threads", type=int, default=0, help="torch's threads in every arm (default: torch's own choice)")
    add("--jobs", type=int, default=1, help="runs at once; reference-system time only (default: 1)")
    add("--evaluations", type=int, default=10, help="validations in each run (default: 10)")
    add(
        "--schedule",
        choices=("own", "linear", "cosine"),
        default="own",
        help="the module's own schedule, stretched over the budget, or the bench's, decayed to zero, in its place",
    )
    add("--rounds", type=int, default=8, help="rehearsals of each arm, which its speed is told from (default: 8)")
    add("--reference", type=Path, metavar="DIR", help="take the prices of steps from this bench, of another machine")
    add("--allow-other-training-data", action="store_true", help="for recipes that choose the training data")
    add("--title", help="of the report")
    add("--quiet", action="store_true", help="no progress bar")
    return options


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """``argv`` after ``bench``; with ``debug`` every error is raised as it came.

    Raises:
        SystemExit: with status 2 where arms cannot be compared or arguments cannot be used, 1 where the bench failed, 130
            if it was interrupted.
    """
    try:
        with told("lightning-eff bench", debug=debug):
            if argv and argv[0] == "report":
                _report(argv[1:])
            elif argv and argv[0] == "compare":
                _compare(argv[1:])
            else:
                _run(argv)
    except KeyboardInterrupt:
        print(
            "\nInterrupted; the same command goes on where it was. Nothing that was finished is lost.", file=sys.stderr
        )
        raise SystemExit(130) from None


def _run(argv: Sequence[str]) -> None:
    options = parser().parse_args(argv)
    from lightning_eff.bench.arms import named
    from lightning_eff.bench.benchmark import Benchmark
    from lightning_eff.bench.reports.report import require_matplotlib

    require_matplotlib()
    baseline_name, baseline = named(options.baseline)
    recipes: dict[str, Any] = {}
    for text in options.recipe:
        name, paths = named(text)
        if name in recipes or name == baseline_name:
            raise ValueError(f"Got two arms named {name!r}; expected a name for each: --recipe other={text}.")
        recipes[name] = paths
    seeds = _numbers("--seeds", options.seeds, int)
    out = options.out or Path("lightning_logs/bench")
    benchmark = Benchmark(
        baseline,
        recipes,
        target=options.target,
        budget=options.budget,
        seeds=seeds if "," in options.seeds else seeds[0],
        out=out,
        mode=options.mode,
        controls="auto" if options.controls == "auto" else None,
        ladder=_numbers("--ladder", options.ladder, float) if options.ladder else (),
        threads=options.threads,
        jobs=options.jobs,
        evaluations=options.evaluations,
        schedule=options.schedule,
        rounds=options.rounds,
        reference=options.reference,
        other_training_data=options.allow_other_training_data,
        title=options.title,
        baseline_name=baseline_name,
    )
    _tell(benchmark.run(progress=not options.quiet), out)


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Numbers with commas between them.

    Raises:
        ValueError: naming the option.
    """
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"Got {option} {text!r}; expected {what} with commas between them.")
    return numbers


def _report(argv: Sequence[str]) -> None:
    from lightning_eff.bench.reports.report import require_matplotlib, write_html, write_pngs
    from lightning_eff.bench.reports.statistics import summarize
    from lightning_eff.bench.results import load, save

    options = Arguments("lightning-eff bench report", description="Draw a bench's report again.")
    options.add_argument("folder", type=Path, metavar="DIR", help="the folder of a bench, or its results.json")
    folder = options.parse_args(argv).folder
    require_matplotlib()
    results = load(folder)
    results["summary"] = summarize(results)
    folder = folder if folder.is_dir() else folder.parent
    save(results, folder)
    write_html(results, folder / "report.html")
    write_pngs(results, folder / "figures")
    _tell(results, folder)


def _tell(results: dict[str, Any], folder: Path) -> None:
    """The table, and where the rest is."""
    from lightning_eff.bench.reports.report import table

    print(table(results, shutil.get_terminal_size((120, 24)).columns))
    print(f"\nresults: {folder / 'results.json'}\nreport:  {folder / 'report.html'}\nfigures: {folder / 'figures'}")


def _compare(argv: Sequence[str]) -> None:
    from lightning_eff.bench.reports.compare import compare
    from lightning_eff.bench.results import load

    options = Arguments("lightning-eff bench compare", description="Set two benches side by side.")
    options.add_argument("first", type=Path, metavar="A")
    options.add_argument("second", type=Path, metavar="B")
    chosen = options.parse_args(argv)
    print(compare(load(chosen.first), load(chosen.second), shutil.get_terminal_size((120, 24)).columns))
