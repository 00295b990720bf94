"""``lightning-eff advise``: what makes a config's run faster without changing its numbers, by trying it."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning_eff._cli.errors import Arguments, UsageError, check_configs, told

_DESCRIPTION = """\
Trains copies of the config's module for some steps, tries each exact technique and setting that could gain something, measures
the best ones together, and compares loss and gradients with those of the plain run. It prints a table and writes advice.html,
advice.json and recipe.yaml into --out, and nothing else.

  lightning-eff advise --config mine.yaml
  lightning-eff fit --config mine.yaml --config lightning_logs/advise/recipe.yaml

recipe.yaml holds the best stack that keeps the numbers. recipe-lower-precision.yaml adds the precision that was fastest.
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = Arguments(
        "lightning-eff advise", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add(
        "--config",
        "-c",
        action="append",
        default=[],
        metavar="FILE",
        help="a config of LightningCLI; several are merged in their order",
    )
    add("--minutes", type=float, default=3.0, help="the time that it may take, besides start-up (default: 3)")
    add(
        "--out",
        type=Path,
        default=Path("lightning_logs/advise"),
        metavar="FOLDER",
        help="the folder for advice.html, advice.json and recipe.yaml (default: lightning_logs/advise)",
    )
    add("--quiet", action="store_true", help="no progress bar")
    return options


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """``argv`` after ``advise``; with ``debug`` every error is raised as it came.

    Raises:
        SystemExit: with status 2 where the arguments or the config cannot be used, 1 where the run does not train, 130 if it
            was interrupted.
    """
    with told("lightning-eff advise", debug=debug, interrupted="Interrupted; nothing was written."):
        _run(argv)


def _run(argv: Sequence[str]) -> None:
    options = parser().parse_args(argv)
    if not options.config:
        raise UsageError("advise needs a config: lightning-eff advise --config mine.yaml")
    check_configs([part for path in options.config for part in ("--config", path)])
    from lightning_eff.advice.advising import LOWER, RECIPE, advise_configs
    from lightning_eff.advice.reports.table import text

    advice = advise_configs(options.config, minutes=options.minutes, out=options.out, progress=not options.quiet)
    print(text(advice.found, shutil.get_terminal_size((110, 24)).columns))
    mine = " ".join(f"--config {path}" for path in options.config)
    print(f"\nreport: {options.out / 'advice.html'}")
    print(f"recipe: {options.out / RECIPE}")
    if advice.found.lower.gains:
        print(f"        {options.out / LOWER} (changes rounding)")
    if advice.stack.gains:
        print(f"run it: lightning-eff fit {mine} --config {options.out / RECIPE}")
