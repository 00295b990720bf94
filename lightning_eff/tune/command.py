"""``lightning-eff tune``: what a search over recipes would try on a config, and why not the rest."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_eff._cli.errors import Arguments, told

_DESCRIPTION = """\
Finds a recipe that trains this config faster to the same target, or says that the baseline stands. Profiles it, asks each
technique whether it could gain something there, searches settings and stacks (and as long the baseline's own rate, decay,
batch and warm-up), confirms the best on fresh seeds, and tells what each technique adds.

  lightning-eff tune --baseline baseline.yaml --target val_loss --budget 120s --search 2h
  lightning-eff tune --baseline baseline.yaml --target val_loss --budget 120s --dry-run    what would be tried, and why not

Writes recipe.yaml, ready for lightning-eff fit, and a report (report.html, report.md) into --out. The same command goes on
where it was, in the time that was left of --search, and with more of it searches on. It does not where the code of the module,
its data or its callbacks has changed since: begin in another folder then.

A space file says more of what is tried:

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
    """The options; but for ``baseline`` and ``quiet`` they are arguments of Tuner."""
    options = Arguments(
        "lightning-eff tune", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add(
        "--baseline",
        required=True,
        metavar="CONFIGS",
        help="config.yaml[,more.yaml]; several are merged in their order",
    )
    add("--target", required=True, metavar="METRIC", help="what validation_step logs, such as val_loss")
    add("--mode", choices=("min", "max"), help="whether less or more of it is better; told by its name otherwise")
    add(
        "--budget",
        required=True,
        help="training seconds of each run: 120s, 2m or 1h, each step at its calibrated price",
    )
    time = options.add_mutually_exclusive_group(required=True)
    time.add_argument(
        "--search", metavar="TIME", help="how long it may take in all, over all times that it is gone on with: 2h, 30m"
    )
    time.add_argument("--dry-run", action="store_true", help="list what would be tried, and why the rest is not")
    add("--memory", metavar="SIZE", help="what a run may use, such as 40GB (default: no limit)")
    add("--space", type=Path, metavar="FILE", help="a YAML file that says more of what is tried")
    several = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME"}
    add("--include", **several, help="try these techniques alone; class paths of callbacks of your own, too")
    add("--exclude", **several, help="do not try these techniques")
    add(
        "--out",
        type=Path,
        default=Path("lightning_logs/tune"),
        help="folder for all that is found; what was interrupted goes on there (default: lightning_logs/tune)",
    )
    add("--jobs", type=int, default=0, help="runs at once (default: one on each CUDA device, or one)")
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where trials run: on this machine, or on the workers of a Ray cluster that shares this folder (needs the extra"
        " ray); --jobs is how many of them (default: as many as there is room for)",
    )
    add("--threads", type=int, default=0, help="torch's threads in each run (default: a share of torch's own choice)")
    add("--seed", type=int, default=0, help="of the runs that search (default: 0)")
    add("--seeds", type=int, default=3, help="fresh ones, on which the best is confirmed (default: 3)")
    add("--price-per-hour", type=float, metavar="PRICE", help="of this machine, to tell what the search cost")
    add("--price-per-kwh", type=float, metavar="PRICE", help="of its electricity")
    add("--quiet", action="store_true", help="no progress")
    return options


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """``argv`` after ``tune``; with ``debug`` every error is raised as it came.

    Raises:
        SystemExit: with status 2 where the arguments or the config cannot be used, 1 where the baseline does not train, 130
            if it was interrupted.
    """
    try:
        with told("lightning-eff tune", debug=debug):
            _run(argv)
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on where it was.", file=sys.stderr)
        raise SystemExit(130) from None


def _run(argv: Sequence[str]) -> None:
    options = vars(parser().parse_args(argv))
    from lightning_eff.tune.tuner import Tuner

    quiet, dry = options.pop("quiet"), options.pop("dry_run")
    for name in ("include", "exclude"):
        options[name] = [part for text in options[name] for part in text.split(",") if part]
    tuner = Tuner(options.pop("baseline").split(","), **options)
    tell = None if quiet else lambda line: print(f"tune: {line}", file=sys.stderr, flush=True)
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
