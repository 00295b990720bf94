"""``lightning-eff merge``: average the weights of several runs, and evaluate the result."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_eff._cli.errors import Arguments, UsageError, told

_DESCRIPTION = """\
Averages the weights of checkpoints from several runs of one model that began from the same pretrained weights.

  lightning-eff merge seed0.ckpt seed1.ckpt seed2.ckpt --out soup.ckpt
  lightning-eff merge runs/*.ckpt --config mine.yaml --method greedy --metric val_acc --mode max --out soup.ckpt

With --config and --metric it evaluates each checkpoint and the merge on the config's validation data. A greedy soup keeps the
checkpoints that do not make it worse. BatchNorm statistics are recomputed on the config's training data.
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of ``lightning-eff merge``."""
    options = Arguments(
        "lightning-eff merge", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="files to merge, two or more")
    add("--out", required=True, type=Path, metavar="FILE", help="file for the merged checkpoint")
    add(
        "--config",
        "-c",
        action="append",
        default=[],
        metavar="FILE",
        help="LightningCLI config with the module and data",
    )
    add("--method", default="uniform", choices=("uniform", "greedy", "warm"), help="default: uniform")
    add("--weights", nargs="+", type=float, metavar="W", help="weight of each checkpoint in a uniform mean")
    add("--metric", metavar="NAME", help="metric that validation logs (default for greedy: val_loss)")
    add(
        "--mode",
        default="min",
        choices=("min", "max"),
        help="whether the metric should be small or large (default: min)",
    )
    add("--bn-batches", type=int, default=100, metavar="N", help="batches for BatchNorm statistics (default: 100)")
    return options


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """Run the command on ``argv``, the arguments after ``merge``; ``debug`` raises every error with its traceback.

    Raises:
        SystemExit: with status 2 if the arguments, the config or the checkpoints are wrong, 130 if interrupted.
    """
    with told("lightning-eff merge", debug=debug, interrupted="Interrupted; nothing was written."):
        _run(argv)


def _run(argv: Sequence[str]) -> None:
    asked = parser().parse_args(argv)
    if (asked.metric or asked.method == "greedy") and not asked.config:
        what = f"--metric {asked.metric}" if asked.metric else "--method greedy"
        raise UsageError(f"{what}: evaluating needs the module and its data. Add --config mine.yaml.")
    from lightning_eff.optim.averaging.merging import merge

    module = data = trainer = None
    if asked.config:
        from lightning_eff._cli.select import built

        trainer, module, data = built(asked.config, 0)
    found = merge(
        asked.checkpoints,
        module,
        data,
        method=asked.method,
        weights=asked.weights,
        metric=asked.metric,
        mode=asked.mode,
        bn_batches=asked.bn_batches,
        trainer=trainer,
    )
    found.save(asked.out)
    print(f"{found}\nwrote {asked.out}")
