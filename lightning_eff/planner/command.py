"""``lightning-eff plan``: the fastest layouts for a recipe's module on so many accelerators, simulated."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_eff.planner._launch.arguments import Request, read


def main(argv: Sequence[str]) -> None:
    """``argv`` after ``plan``.

    Raises:
        SystemExit: with status 2 where the arguments or the recipe cannot be used, 130 if interrupted.
    """
    try:
        _run(read(argv))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"lightning-eff plan: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(request: Request) -> None:
    from lightning_eff.planner.profiling import precision_of, profile_module
    from lightning_eff.planner.recipe import read_recipe
    from lightning_eff.planner.report import report
    from lightning_eff.planner.search import search
    from lightning_eff.planner.timeline import draw

    options, accelerator, assumptions = request.options, request.accelerator, request.assumptions
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
