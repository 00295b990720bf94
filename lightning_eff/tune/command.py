"""``lightning-eff tune``: what a search over recipes would try on a config, and why not the rest."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_eff._errors import Arguments, told

_DESCRIPTION = """\
What could make this config train faster? Profiles it, asks each technique whether it could gain something there and what it
would try, and lets each that could train for two steps. Lists what is tried, and why the rest is not.

  lightning-eff tune --baseline baseline.yaml --target val_loss --budget 120s

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
    add("--threads", type=int, default=0, help="torch's threads in each run (default: a share of torch's own choice)")
    add("--seed", type=int, default=0, help="of the runs (default: 0)")
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

    quiet = options.pop("quiet")
    for name in ("include", "exclude"):
        options[name] = [part for text in options[name] for part in text.split(",") if part]
    tuner = Tuner(options.pop("baseline").split(","), **options)
    look = tuner.look(None if quiet else lambda line: print(f"tune: {line}", file=sys.stderr, flush=True))
    print("\n".join(look.lines()))
