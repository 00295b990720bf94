"""``lightning-eff plan``: the fastest layouts for a recipe's module on so many accelerators, simulated."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from lightning_eff.planner.accelerators import ACCELERATORS, find_accelerator
from lightning_eff.planner.costs import Assumptions

_DESCRIPTION = """\
Which layout (data, sharded, tensor, pipeline; micro-batches, schedule, what is computed again) trains a recipe's module
fastest on so many accelerators? From a profile of the module on this machine, on shapes alone, and a table of accelerators;
every layout's memory is predicted, and the best are simulated operation by operation. No accelerator is needed.

  lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
"""
_DEFAULT = Assumptions()


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        "lightning-eff plan", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--config", required=True, action="append", metavar="YAML", help="config of LightningCLI; several are merged")
    add("--gpus", required=True, type=int, metavar="N", help="accelerators in all")
    add("--gpu", required=True, metavar="NAME", help=f"which: {', '.join(ACCELERATORS)}")
    add(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples of a step (default: what the recipe would have on so many accelerators under DDP: its batch size"
        " x its accumulation x --gpus)",
    )
    add("--precision", help="in place of the recipe's: 32-true, bf16-mixed, bf16-true, 16-mixed or 16-true")
    add("--fp8", action="store_true", help="linear layers multiply in FP8 (known of a recipe with such a plugin)")
    add("--layers", metavar="PATH", help="dotted path of the stack of blocks, where it is not the longest")
    add(
        "--efficiency",
        type=float,
        default=_DEFAULT.efficiency,
        help="matmul rate in a model over that of the best matmul measured on the accelerator, in (0, 1]; a ceiling of"
        f" MFU follows from it (default: {_DEFAULT.efficiency}, from a layer measured by Korthikanti et al. 2022)",
    )
    add(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other assumption: "
        + ", ".join(f"{f.name}={getattr(_DEFAULT, f.name)}" for f in fields(Assumptions) if f.type is float),
    )
    add(
        "--fused",
        action="store_true",
        help="take everything between two matmuls as one kernel, as torch.compile makes it; eager mode otherwise",
    )
    add("--no-sequence-parallel", action="store_true", help="tensor parallelism leaves norms and residuals whole")
    add(
        "--profile",
        choices=("fake", "real"),
        default="fake",
        help="run the training step on shapes alone, or really, where it depends on values (default: fake)",
    )
    add(
        "--timeline",
        default="lightning_logs/plan/timeline.png",
        metavar="PNG",
        help="picture of the best layout's step; none leaves it out (default: lightning_logs/plan/timeline.png)",
    )
    add(
        "--json",
        metavar="FILE",
        help="write everything there too; - writes it to the standard output in place of the table",
    )
    add("--quiet", action="store_true", help="no progress on the standard error")
    return options


def main(argv: Sequence[str]) -> None:
    """``argv`` after ``plan``.

    Raises:
        SystemExit: with status 2 where the arguments or the recipe cannot be used, 130 if interrupted.
    """
    options = parser().parse_args(argv)
    try:
        _run(options)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"lightning-eff plan: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(options: argparse.Namespace) -> None:
    from lightning_eff.planner.profiling import precision_of, profile_module
    from lightning_eff.planner.recipe import read_recipe
    from lightning_eff.planner.report import report
    from lightning_eff.planner.search import search
    from lightning_eff.planner.timeline import draw, require_matplotlib

    accelerator = find_accelerator(options.gpu)
    for name in ("gpus", "global_batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1.")
    assumptions = Assumptions(
        fused=options.fused,
        sequence_parallel=not options.no_sequence_parallel,
        **{"efficiency": options.efficiency, **_assumed(options.assume)},
    )
    if options.timeline != "none":
        require_matplotlib()
    progress = _Progress(silent=options.quiet)
    progress.tell("building the module", always=True)
    recipe = read_recipe(options.config, real=options.profile == "real")
    precision = precision_of(options.precision or recipe.precision, fp8=options.fp8 or recipe.fp8)
    progress.tell("profiling a training step", always=True)
    profile = profile_module(
        recipe.module,
        recipe.batch,
        precision=precision,
        fake_mode=recipe.fake_mode,
        state_bytes=recipe.state_bytes,
        layers=options.layers,
        notes=recipe.notes,
    )
    batch = options.global_batch
    if batch is None:
        batch = recipe.batch_size * recipe.accumulate * options.gpus
        note = f"global batch of {batch:,}: the recipe's {recipe.batch_size} x {recipe.accumulate} accumulated x --gpus"
        profile = replace(profile, notes=(*profile.notes, note))
    plan = search(profile, accelerator, options.gpus, batch, assumptions, progress.tell)
    progress.close()
    record = json.dumps(plan.record(), indent=1)
    if options.json == "-":
        print(record)
    else:
        print(report(plan))
        if options.json:
            Path(options.json).parent.mkdir(parents=True, exist_ok=True)
            Path(options.json).write_text(record + "\n")
    if options.timeline != "none" and plan.best and plan.timeline is not None:
        best = plan.best[0]
        at = best.layout
        title = f"{profile.name} on {options.gpus:,} x {accelerator.name}: dp {at.dp}, tp {at.tp}, pp {at.pp}, {at.schedule}"
        draw(Path(options.timeline), title, best, plan.timeline)
        if options.json != "-":
            print(f"Timeline of the first one: {options.timeline}")


def _assumed(texts: Sequence[str]) -> dict[str, float]:
    """``NAME=VALUE``, several times."""
    names = [f.name for f in fields(Assumptions) if f.type is float]
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if name not in names:
            raise ValueError(f"--assume {text}: expected NAME=NUMBER with one of {', '.join(names)}.")
    return found


class _Progress:
    """A line on the standard error: over itself on a terminal, else now and then."""

    def __init__(self, *, silent: bool) -> None:
        self._silent, self._terminal, self._last = silent, sys.stderr.isatty(), 0.0

    def tell(self, text: str, *, always: bool = False) -> None:
        now = time.monotonic()
        if self._silent or (not always and now - self._last < (0.2 if self._terminal else 5.0)):
            return
        self._last = now
        end = "" if self._terminal else "\n"
        print(f"\r\x1b[Kplan: {text}" if self._terminal else f"plan: {text}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal and not self._silent:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
