"""``lightning-eff``: LightningCLI's fit, validate, test and predict with the techniques known by their short names."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import lightning_eff

_USAGE = """\
usage: lightning-eff {fit,validate,test,predict} --config recipe.yaml [options of LightningCLI]
       lightning-eff bench --baseline a.yaml --recipe b.yaml --target val_loss --budget 120s --seeds 3
       lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
       lightning-eff techniques

  fit, validate, test, predict   a LightningModule and data named in a LightningCLI config, by their class_path;
                                 techniques go into trainer.callbacks, and precision plugins into trainer.plugins, by
                                 class name alone. More: lightning-eff fit --help
  bench                          does a recipe pay, by how much, and how sure is that? More: lightning-eff bench --help
  plan                           which layout trains a recipe's module fastest on so many accelerators, by simulation;
                                 needs none of them. More: lightning-eff plan --help
  techniques                     every technique: what it saves, how, its paper, its constraints

Modules are looked up from the current folder too.
"""


def technique_classes() -> list[Any]:
    """Every exported technique, by name: the classes of callbacks, precision plugins and strategies."""
    from lightning.pytorch.strategies import Strategy

    from lightning_eff._core.technique import Technique
    from lightning_eff._core.wrapping import WrappingPrecision

    exported = (getattr(lightning_eff, name) for name in sorted(lightning_eff.__all__))
    how = Technique | WrappingPrecision | Strategy
    return [cls for cls in exported if isinstance(cls, type) and issubclass(cls, how)]


def techniques_table(width: int) -> str:
    """The techniques as a table of ``width`` columns (at least about 120), from what the classes say of themselves."""
    header = ("technique", "how", "what it saves", "paper", "constraints")
    rows = [(cls.__name__, cls.kind, cls.saves, cls.paper, cls.constraints or "-") for cls in technique_classes()]
    fixed = [max(len(row[i]) for row in [header, *rows]) for i in (0, 1)]
    left = max(width - sum(fixed) - 8, 75)  # narrower columns would break words
    widths = [*fixed, left // 3, left // 3, left - 2 * (left // 3)]
    lines: list[str] = []
    for row in [header, tuple("-" * w for w in widths), *rows]:
        cells = [textwrap.wrap(text, w) or [""] for text, w in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            line = "  ".join((cell[i] if i < len(cell) else "").ljust(w) for cell, w in zip(cells, widths, strict=True))
            lines.append(line.rstrip())
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> None:
    """The command line; ``args`` default to the process's own.

    Raises:
        SystemExit: with status 2 on unusable arguments, as LightningCLI does.
    """
    argv = list(sys.argv[1:] if args is None else args)
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return
    if argv[0] == "techniques":
        if argv[1:]:
            print(f"lightning-eff techniques: got {argv[1:]}; expected no arguments.", file=sys.stderr)
            raise SystemExit(2)
        print(techniques_table(shutil.get_terminal_size((140, 24)).columns))
        return
    if argv[0] == "bench":
        from lightning_eff.bench.command import main as bench

        bench(argv[1:])
        return
    if argv[0] == "plan":
        from lightning_eff.planner.command import main as plan

        plan(argv[1:])
        return
    try:
        import jsonargparse  # noqa: F401
        from lightning.pytorch.cli import LightningArgumentParser, LightningCLI  # noqa: F401
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"lightning-eff {argv[0]}: {error.name} is not installed; LightningCLI needs it."
            ' Run: pip install "jsonargparse[signatures]"'
        ) from error
    from lightning.pytorch import LightningDataModule, LightningModule

    import lightning_eff.bench.monitor  # noqa: F401 - configs may name it by class name alone
    from lightning_eff.report import TrainingReport

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [TrainingReport()]},
        args=argv,
    )


if __name__ == "__main__":
    main()
