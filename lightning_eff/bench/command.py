"""``lightning-eff bench``: run a benchmark over configs, draw its report again, or compare two benches."""

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import Arguments, told
from lightning_eff._core._lightning.names import is_subclass

_DESCRIPTION = """\
Measures whether a recipe is faster than its baseline, by how much, and how certain that is. All arms train in turns for the
same number of training seconds, with a learning rate that decays to zero, and with the same data order for each seed.

  lightning-eff bench --baseline a.yaml --recipe b.yaml --target val_loss --budget 120s --seeds 3
  lightning-eff bench report DIR        draw the report of a bench again
  lightning-eff bench compare A B       compare two benches
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of a run. Most options have the names of Benchmark's arguments."""
    options = Arguments(
        "lightning-eff bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    configs = "[name=]config.yaml[,more.yaml]; several configs are merged from left to right, as by LightningCLI"
    add("--baseline", required=True, metavar="CONFIGS", help=configs)
    add(
        "--recipe",
        action="append",
        default=[],
        metavar="CONFIGS",
        help="the same for a recipe; repeat it for more recipes",
    )
    add("--target", required=True, metavar="METRIC", help="a metric that validation_step logs, such as val_loss")
    add("--mode", choices=("min", "max"), help="whether a lower or a higher target is better (default: by its name)")
    add(
        "--budget",
        required=True,
        help="training time of each run: 120s, 2m or 1h of wall-clock time, or 120rs of reference-system time, in which each"
        " step costs the calibrated time of its kind, so that a busy machine does not matter. 20rs,60rs runs a bench at each",
    )
    add(
        "--seeds",
        default="3",
        help="the number of seeds, or a list of them with a comma: 3, or 5,6,7, or 7, for seed 7 alone (default: 3)",
    )
    add(
        "--out",
        type=Path,
        default=Path("lightning_logs/bench"),
        help="folder for the results; an interrupted bench continues there (default: lightning_logs/bench)",
    )
    add(
        "--controls",
        choices=("auto", "none"),
        default="auto",
        help="whether to add the controls that each technique names (default: auto)",
    )
    add(
        "--ladder",
        default="",
        metavar="F,F",
        help="also run the baseline at these factors of the budget, such as 0.67,1.5",
    )
    add("--threads", type=int, default=0, help="torch threads per run (default: torch's choice)")
    add("--jobs", type=int, default=1, help="parallel runs, in reference-system time only (default: 1)")
    add("--evaluations", type=int, default=10, help="validations per run (default: 10)")
    add(
        "--schedule",
        choices=("own", "linear", "cosine"),
        default="own",
        help="the module's own learning rate schedule, stretched over the budget, or one that decays to zero (default: own)",
    )
    add("--rounds", type=int, default=8, help="rehearsals per arm, which measure its speed (default: 8)")
    add(
        "--reference",
        type=Path,
        metavar="FILE",
        help="a file with the baseline's step costs, so that a reference second is the same in every bench on one machine. The"
        " first bench writes it. Or the folder of a bench, on any machine, whose step costs count",
    )
    add(
        "--allow-other-training-data",
        action="store_true",
        dest="other_training_data",
        help="allow recipes to train on other data than the baseline",
    )
    own = "of an arm that needs its own; repeat it for more arms"
    add("--rate", dest="rates", action="append", default=[], metavar="NAME=RATE", help=f"the peak learning rate {own}")
    add(
        "--warm-up",
        dest="warm_ups",
        action="append",
        default=[],
        metavar="NAME=TIME",
        help=f"the warm-up, in seconds or as a fraction of the budget (5s, 5%%), {own}",
    )
    add(
        "--tuned",
        metavar="NAME,NAME",
        help="the arms whose settings were tuned for this budget, or none; the report names them",
    )
    add(
        "--logger",
        metavar="CLASS[,ARG=VALUE]",
        help="also log curves and figures to this Lightning logger, such as CSVLogger or my.module.Logger,name=x",
    )
    add("--title", help="the title of the report")
    add(
        "--dry-run",
        action="store_true",
        help="check every arm with a few steps, print the time that the bench takes, and stop",
    )
    add("--quiet", action="store_true", help="do not show a progress bar")
    return options


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """Run the command with the arguments after ``bench``. With ``debug``, errors keep their traceback.

    Raises:
        SystemExit: with status 2 for unusable arguments or arms that cannot be compared, 1 if the bench failed, and 130 if it
            was interrupted.
    """
    text = "Interrupted. The same command continues the bench; finished runs are kept."
    with told("lightning-eff bench", debug=debug, interrupted=text):
        if argv and argv[0] == "report":
            _report(argv[1:])
        elif argv and argv[0] == "compare":
            _compare(argv[1:])
        else:
            _run(argv)


def _run(argv: Sequence[str]) -> None:
    options = vars(parser().parse_args(argv))
    from lightning_eff.bench.arms import named
    from lightning_eff.bench.benchmark import Benchmark
    from lightning_eff.bench.reports.report import require_extra

    require_extra()
    baseline_name, baseline = named(options.pop("baseline"))
    recipes: dict[str, Any] = {}
    for text in options.pop("recipe"):
        name, paths = named(text)
        if name in recipes or name == baseline_name:
            raise ValueError(f"Got two arms named {name!r}. Give this one another name: --recipe other={text}.")
        recipes[name] = paths
    progress, dry, out = not options.pop("quiet"), options.pop("dry_run"), options["out"]
    seeds = _numbers("--seeds", options["seeds"], int)
    options["seeds"] = seeds if "," in options["seeds"] else seeds[0]
    options["controls"] = "auto" if options["controls"] == "auto" else None
    options["ladder"] = _numbers("--ladder", options["ladder"], float) if options["ladder"] else ()
    options["rates"] = _pairs("--rate", options["rates"], float)
    options["warm_ups"] = _pairs("--warm-up", options["warm_ups"], str)
    options["tuned"] = _names(options["tuned"])
    options["logger"] = _logger(options["logger"], out) if options["logger"] else None
    benchmark = Benchmark(baseline, recipes, baseline_name=baseline_name, **options)
    if dry:
        text, possible = benchmark.dry_run(_width())
        print(text)
        if not possible:
            raise SystemExit(2)
        return
    _print(benchmark.run(progress=progress), out)


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Parse numbers with commas between them.

    Raises:
        ValueError: for any other text.
    """
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"Got {option} {text!r}; expected {what} with commas between them.")
    return numbers


def _pairs(option: str, texts: Sequence[str], kind: Callable[[str], Any]) -> dict[str, Any]:
    """Parse several ``NAME=VALUE``.

    Raises:
        ValueError: for any other text, or a name that occurs twice.
    """
    pairs: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            new = kind(value) if name and value and name not in pairs else None
        except ValueError:
            new = None
        if new is None:
            what = "NAME=NUMBER" if kind is float else "NAME=VALUE"
            raise ValueError(f"Got {option} {text!r}; expected {what}, once for each arm.")
        pairs[name] = new
    return pairs


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]


def _logger(text: str, out: Path) -> Any:
    """Create a Lightning logger by the name of its class. By default it saves to the bench's folder.

    Raises:
        ValueError: if there is no such class, it is not a logger, or it does not take these arguments.
    """
    import importlib
    import inspect

    from lightning.pytorch.loggers.logger import Logger

    path, *given = text.split(",")
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "lightning.pytorch.loggers"), name)
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and is_subclass(found, Logger)):
        raise ValueError(
            f"Got --logger {text!r}; expected a Lightning logger: the name of one in lightning.pytorch.loggers, such as"
            " CSVLogger, or the dotted path of another class."
        )
    arguments: dict[str, Any] = {}
    for part in given:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"Got --logger {text!r}; expected ARG=VALUE after the class, with commas between them.")
        arguments[key] = value
    if "save_dir" in inspect.signature(found).parameters:
        arguments.setdefault("save_dir", out)
    try:
        return found(**arguments)
    except (TypeError, ModuleNotFoundError) as error:
        raise ValueError(f"Got --logger {text!r}, which cannot be created: {error}.") from None


def _report(argv: Sequence[str]) -> None:
    from lightning_eff.bench import several
    from lightning_eff.bench.reports.report import require_extra, write
    from lightning_eff.bench.reports.statistics import summarize
    from lightning_eff.bench.results import load

    options = Arguments("lightning-eff bench report", description="Draw a bench's report again.")
    options.add_argument("folder", type=Path, metavar="DIR", help="the folder of a bench, or its results.json")
    folder = options.parse_args(argv).folder
    require_extra()
    every = several.found(folder)
    alone = None if every else load(folder)
    place = folder if folder.is_dir() else folder.parent
    for name, results in every.items() if alone is None else [("", alone)]:
        results["summary"] = summarize(results)
        write(results, place / name)
    if every:
        several.draw(every, place)
    _print(alone or every, place)


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _print(results: dict[str, Any], folder: Path) -> None:
    """Print the table and the paths of the files, of one bench or of several budgets."""
    from lightning_eff.bench.reports import overview
    from lightning_eff.bench.reports.report import fitting, grid, table

    if "plan" not in results:
        for budget, one in results.items():
            _print(one, folder / budget)
            print()
        print(grid(*overview.columns_and_rows(results), fitting(_width())))
        print(f"\nall budgets: {folder / 'report.html'}")
        return
    print(table(results, _width()))
    print(f"\nresults: {folder / 'results.json'}\nreport:  {folder / 'report.html'}\nfigures: {folder / 'figures'}")


def _compare(argv: Sequence[str]) -> None:
    from lightning_eff.bench.reports.compare import compare
    from lightning_eff.bench.results import load

    options = Arguments("lightning-eff bench compare", description="Compare two benches.")
    options.add_argument("first", type=Path, metavar="A")
    options.add_argument("second", type=Path, metavar="B")
    chosen = options.parse_args(argv)
    print(compare(load(chosen.first), load(chosen.second), _width()))
