"""``lightning-eff``: LightningCLI's fit, validate, test and predict with the techniques known by their short names."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

from lightning_eff._errors import Arguments, UsageError, check_configs, did_you_mean, told
from lightning_eff._techniques import technique_classes

_USAGE = """\
usage: lightning-eff {fit,validate,test,predict} --config recipe.yaml [options of LightningCLI]
       lightning-eff bench --baseline a.yaml --recipe b.yaml --target val_loss --budget 120s --seeds 3
       lightning-eff tune --baseline a.yaml --target val_loss --budget 120s --search 2h
       lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
       lightning-eff budget --hours 5000 --gpu h100
       lightning-eff techniques

  fit, validate, test, predict   a LightningModule and data named in a LightningCLI config, by their class_path;
                                 techniques go into trainer.callbacks, and precision plugins into trainer.plugins, by
                                 class name alone. More: lightning-eff fit --help
  bench                          does a recipe pay, by how much, and how sure is that? More: lightning-eff bench --help
  tune                           the recipe that wins on a config, searched and confirmed; or what could be tried, and why not.
                                 More: lightning-eff tune --help
  plan                           which layout trains a recipe's module fastest on so many accelerators, by simulation;
                                 needs none of them. More: lightning-eff plan --help
  budget                         the size and the tokens that FLOPs, accelerator-hours or money are best spent on.
                                 More: lightning-eff budget --help
  techniques                     every technique: what it saves, how, its paper, its constraints

Modules are looked up from the current folder too. Errors are told in a paragraph; --debug gives the traceback.
"""
COMMANDS = ("fit", "validate", "test", "predict", "bench", "tune", "plan", "budget", "techniques")


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
        SystemExit: with status 2 where the arguments, the config or the run that they ask for cannot be used, and 1 for a
            run that failed, after one paragraph on the standard error; with ``--debug`` every error is raised as it came.
    """
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv
    argv = [argument for argument in argv if argument != "--debug"]
    command = f"lightning-eff {argv[0]}" if argv and argv[0] in COMMANDS else "lightning-eff"
    with told(command, debug=debug):
        _run(argv, debug=debug)


def _run(argv: list[str], *, debug: bool) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return
    command, *rest = argv
    if command == "techniques":
        Arguments("lightning-eff techniques", description="Lists every technique.").parse_args(rest)
        print(techniques_table(shutil.get_terminal_size((140, 24)).columns))
    elif command == "bench":
        from lightning_eff.bench.command import main as bench

        bench(rest, debug=debug)
    elif command == "tune":
        from lightning_eff.tune.command import main as tune

        tune(rest, debug=debug)
    elif command == "plan":
        from lightning_eff.planner.command import main as plan

        plan(rest, debug=debug)
    elif command == "budget":
        from lightning_eff.planner._launch.budget_command import main as budget

        budget(rest, debug=debug)
    elif command in COMMANDS or (command.startswith("-") and not {*argv}.isdisjoint(COMMANDS)):
        _lightning(argv)
    else:
        raise UsageError(
            f"got {command!r}; expected one of {', '.join(COMMANDS)}.{did_you_mean(command, COMMANDS)} More: lightning-eff"
            " --help"
        )


def _lightning(argv: list[str]) -> None:
    """One of LightningCLI's own commands."""
    check_configs(argv)
    try:
        from lightning_eff._config import ConfigCLI
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{error.name} is not installed; LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        ) from error

    from lightning_eff.report import TrainingReport

    ConfigCLI(argv, save_config_kwargs={"overwrite": True}, trainer_defaults={"callbacks": [TrainingReport()]})


if __name__ == "__main__":
    main()
