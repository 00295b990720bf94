"""``lightning-eff tune``: search for a recipe that beats a baseline, or list its candidates."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import Arguments, told

_DESCRIPTION = """\
Search for a recipe that trains this config faster to the same target, or report that the baseline won. The search profiles
the baseline and asks each technique whether it can help. It tries techniques, their settings and combinations, and spends as
many trials on the baseline's own learning rate, weight decay, batch size and warm-up. It confirms the best recipe on new seeds,
and measures the gain of each technique.

  lightning-eff tune --baseline baseline.yaml --target val_loss --budget 120s --search 2h
  lightning-eff tune --baseline baseline.yaml --target val_loss --budget 120s --dry-run    list what would be tried

--search is the time of the whole search. It includes the confirmation, and the search says at its start what fits. A search
that cannot confirm anything in its time is refused. It writes recipe.yaml, for lightning-eff fit, and a report (report.html,
report.md) into --out. The same command resumes an interrupted search with the time that was left, and a longer --search
continues a finished one. If the code of the module, its data or its callbacks has changed, use another folder.

With --narrow, the search tunes the learning rate and weight decay on a narrow copy of the model, and tries no techniques. It
carries them over to the baseline by MuP, and confirms the result there:

  lightning-eff tune --baseline wide.yaml --narrow narrow.yaml --target val_loss --budget 10m --search 1h

A space file refines the search space:

  own:
    rate: {low: 1.0e-4, high: 1.0e-2, log: true}
    batch: {key: data.init_args.batch_size, values: [16, 32]}
  techniques:
    ReplaceOptimizer: {momentum: [0.8, 0.9]}
    ProgressiveStacking: false
    my_package.MyCallback: {strength: {low: 0.1, high: 1.0}}
  most: 3
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser. Its options are arguments of Tuner, except ``baseline``, ``narrow``, ``quiet`` and ``dry_run``."""
    options = Arguments(
        "lightning-eff tune", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add(
        "--baseline",
        required=True,
        metavar="CONFIGS",
        help="config.yaml[,more.yaml], merged from left to right",
    )
    add(
        "--narrow",
        metavar="CONFIGS",
        help="configs on top of the baseline's that reduce only its width, such as model.init_args.dim: search the learning"
        " rate there, and carry it over",
    )
    add("--target", required=True, metavar="METRIC", help="the metric that validation_step logs, such as val_loss")
    add("--mode", choices=("min", "max"), help="whether a lower or higher metric is better (default: by its name)")
    add(
        "--budget",
        required=True,
        help="the training time of each run: 120s, 2m or 1h. A step counts with its calibrated cost",
    )
    time = options.add_mutually_exclusive_group(required=True)
    time.add_argument(
        "--search", metavar="TIME", help="the time of the whole search, with the time before it was resumed: 2h, 30m"
    )
    time.add_argument(
        "--dry-run", action="store_true", help="list what a search would try, and why it leaves out the rest"
    )
    add("--memory", metavar="SIZE", help="the memory that a run may use, such as 40GB (default: no limit)")
    add("--space", type=Path, metavar="FILE", help="a YAML file that refines the search space")
    several = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME"}
    add("--include", **several, help="try only these techniques. Your own callbacks are class paths")
    add("--exclude", **several, help="leave these techniques out")
    add(
        "--out",
        type=Path,
        default=Path("lightning_logs/tune"),
        help="the folder for all results, in which a search resumes (default: lightning_logs/tune)",
    )
    add(
        "--jobs",
        type=int,
        default=0,
        help="the number of parallel runs (default: one per CUDA device, or up to four on a CPU)",
    )
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where trials run: on this machine, or on --jobs workers of a Ray cluster that shares this folder (needs the"
        " extra ray; default: as many workers as fit)",
    )
    add(
        "--threads",
        type=int,
        default=0,
        help="the number of torch threads per run (default: the cores divided by --jobs)",
    )
    add("--seed", type=int, default=0, help="the seed of the searching runs (default: 0)")
    add("--seeds", type=int, default=3, help="the number of new seeds that confirm the best recipe (default: 3)")
    add(
        "--price-per-hour",
        type=float,
        metavar="PRICE",
        help="the price of this machine per hour, for the reported cost",
    )
    add("--price-per-kwh", type=float, metavar="PRICE", help="the price of its electricity per kWh")
    add("--quiet", action="store_true", help="print no progress")
    return options


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """Run the command.

    Args:
        argv: the arguments after ``tune``.
        debug: whether errors are raised as they are.

    Raises:
        SystemExit: with status 2 for arguments or a config that cannot be used, 1 if the baseline does not train, and 130
            after an interruption.
    """
    with told("lightning-eff tune", debug=debug, interrupted="Interrupted. The same command resumes the search."):
        _run(argv)


def _run(argv: Sequence[str]) -> None:
    options = vars(parser().parse_args(argv))
    from lightning_eff.tune.tuner import Tuner

    quiet, dry = options.pop("quiet"), options.pop("dry_run")
    for name in ("include", "exclude"):
        options[name] = [part for text in options[name] for part in text.split(",") if part]
    baseline, narrow = options.pop("baseline").split(","), options.pop("narrow")
    tell = None if quiet else lambda line: print(f"tune: {line}", file=sys.stderr, flush=True)
    if narrow is not None:
        _carry_over(baseline, narrow.split(","), options, tell, dry=dry)
        return
    tuner = Tuner(baseline, **options)
    if dry:
        print("\n".join(tuner.look(tell).lines()))
        return
    results = tuner.run(progress=not quiet, tell=tell)
    print(f"{results['sentence']}\n")
    for line in results["contributions"]:
        print(f"  {line}")
    print(
        f"report: {tuner.out / 'report.html'}\n" + (f"recipe: {tuner.out / 'recipe.yaml'}" if results["recipe"] else "")
    )


def _carry_over(
    baseline: list[str], narrow: list[str], options: dict[str, Any], tell: Callable[[str], None] | None, *, dry: bool
) -> None:
    from lightning_eff.tune.narrowing import NarrowTuner

    tuner = NarrowTuner(baseline, narrow, **options)
    if dry:
        print("\n".join(tuner.look(tell).lines()))
        return
    results = tuner.run(progress=tell is not None, tell=tell)
    print(f"{results['sentence']}\n\nreport: {tuner.out / results['bench'] / 'report.html'}")
    print(f"recipe: {tuner.out / 'recipe.yaml'}")
