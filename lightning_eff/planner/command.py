"""``lightning-eff plan``: find the fastest layouts for a recipe's module on a number of accelerators."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_eff._cli.errors import told
from lightning_eff.planner._launch.arguments import Request, no_fp8, read


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """Run the command on ``argv``, the arguments after ``plan``; ``debug`` lets every error through with its traceback.

    Raises:
        SystemExit: with status 2 if the arguments or the recipe are wrong, 1 if the plan failed, 130 if interrupted.
    """
    with told("lightning-eff plan", debug=debug, interrupted="Interrupted."):
        _run(read(argv))


def _run(request: Request) -> None:
    from lightning_eff._core._lightning.names import OWN, package_of
    from lightning_eff.planner._launch.abilities import PLANNED, abilities
    from lightning_eff.planner._launch.configuration import Section, as_yaml, configuration
    from lightning_eff.planner.costs import Costs
    from lightning_eff.planner.profiling import precision_of, profile_module
    from lightning_eff.planner.recipe import read_recipe
    from lightning_eff.planner.report import report
    from lightning_eff.planner.search import search
    from lightning_eff.planner.timeline import draw

    options, assumptions = request.options, request.assumptions
    accelerator = replace(request.accelerator, node_size=request.devices)
    progress = _Progress(silent=options.quiet)
    progress.tell("building the module", always=True)
    recipe = read_recipe(options.config, real=options.profile == "real")
    multiplies = options.fp8 or recipe.fp8
    precision = precision_of(options.precision or recipe.precision, fp8=multiplies)
    if multiplies and accelerator.fp8_matmul_flops is None:
        raise ValueError(no_fp8(accelerator))
    able = abilities(
        recipe.module,
        callbacks=[cls for cls in recipe.callbacks if cls.__name__ not in PLANNED],
        plugins=recipe.trainer["plugins"],
        precision=precision.name,
        optimizer=recipe.optimizer,
        sync_batchnorm=bool(recipe.trainer.get("sync_batchnorm")),
        fp8=multiplies,
        batch=None if recipe.batch_key else recipe.batch_size,
        without=options.without,
        exact=options.exact,
    )
    progress.tell("profiling a training step", always=True)
    profile = profile_module(
        recipe.module,
        recipe.batch,
        precision=replace(precision, fp8=precision.fp8 and recipe.fp8),
        fake_mode=recipe.fake_mode,
        state_bytes=recipe.state_bytes,
        layers=options.layers,
        notes=recipe.notes,
    )
    notes = list(profile.notes)
    batch = options.global_batch
    if batch is None:
        batch = recipe.batch_size * recipe.accumulate * options.gpus
        notes.append(
            f"global batch {batch:,}: batch size {recipe.batch_size} x accumulation {recipe.accumulate} x --gpus {options.gpus}"
        )
    if options.assume_pairs:
        profile = replace(profile, paired=True)
    elif profile.blocks and not profile.paired:
        notes.append(
            "the module has no plan for tensor parallelism, so every rank has whole activations; if the strategy reports pairs"
            " in attention and MLP at setup, plan again with --assume-pairs"
        )
    notes += [f"not searched: {name}, since {why}" for name, why in able.refused.items() if name not in options.without]
    replaced = [cls.__name__ for cls in recipe.callbacks if cls.__name__ in PLANNED]
    notes += [f"the plan's choice replaces the recipe's {name}" for name in replaced]
    profile = replace(profile, notes=tuple(notes))
    only = dict(request.only)
    if options.fp8 and not recipe.fp8:
        only["fp8"] = True
    plan = search(profile, accelerator, options.gpus, batch, assumptions, progress.tell, able=able, only=only)
    progress.close()
    written: str | None = None
    if plan.best:
        at = plan.best[0].layout
        section = Section(
            callbacks=recipe.trainer["callbacks"],
            plugins=recipe.trainer["plugins"],
            precision=None if recipe.fp8 else precision.name,
            batch_key=recipe.batch_key,
            batch_size=recipe.batch_size,
            layers=profile.stack,
            configs=options.config,
            package=package_of(recipe.module) or OWN,
        )
        split = Costs(profile, accelerator, assumptions).split(at.num_stages)
        found = configuration(at, split, request.devices, section)
        nodes = options.gpus // request.devices
        written = as_yaml(found, section, options.out or "plan.yaml", request.devices, nodes)
        if options.out:
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            Path(options.out).write_text(written)
    record = json.dumps({**plan.record(), "config": written}, indent=1)
    if options.json == "-":
        print(record)
    else:
        print(report(plan, written))
        if options.json:
            Path(options.json).parent.mkdir(parents=True, exist_ok=True)
            Path(options.json).write_text(record + "\n")
    if options.timeline != "none" and plan.best and plan.timeline is not None:
        best = plan.best[0]
        at = best.layout
        title = f"{profile.name} on {options.gpus:,} x {accelerator.name}: dp {at.dp}, tp {at.tp}, pp {at.pp}, {at.schedule}"
        draw(Path(options.timeline), title, best, plan.timeline)
        if options.json != "-":
            print(f"Timeline of layout 1: {options.timeline}")


class _Progress:
    """Shows progress on standard error: one line that changes on a terminal, otherwise a line every few seconds."""

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
