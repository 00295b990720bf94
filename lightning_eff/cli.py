"""``lightning-eff``: LightningCLI's fit, validate, test and predict with the techniques known by their short names."""

import shutil
import sys
import warnings
from collections.abc import Sequence

from lightning_eff._catalogue import catalogue
from lightning_eff._catalogue.row import GROUPS
from lightning_eff._cli.errors import Arguments, UsageError, check_configs, did_you_mean, told
from lightning_eff._exports import public

_USAGE = """\
usage: lightning-eff {fit,validate,test,predict} --config recipe.yaml [options of LightningCLI]
       lightning-eff bench --baseline a.yaml --recipe b.yaml --target val_loss --budget 120s --seeds 3
       lightning-eff tune --baseline a.yaml --target val_loss --budget 120s --search 2h
       lightning-eff select dsir --raw crawl.txt --target books.txt --keep 0.1 --out kept.npz
       lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
       lightning-eff budget --hours 5000 --gpu h100
       lightning-eff techniques --search memory
       lightning-eff recipe {list,show gpt}

  fit, validate, test, predict   a LightningModule and data named in a LightningCLI config, by their class_path;
                                 techniques go into trainer.callbacks, and precision plugins into trainer.plugins, by
                                 class name alone. More: lightning-eff fit --help
  bench                          does a recipe pay, by how much, and how sure is that? More: lightning-eff bench --help
  tune                           the recipe that wins on a config, searched and confirmed; or what could be tried, and why not.
                                 More: lightning-eff tune --help
  select                         which samples of a data set to train on, by text or by a module's scores, written for
                                 SampleSubset. More: lightning-eff select --help
  plan                           which layout trains a recipe's module fastest on so many accelerators, by simulation;
                                 needs none of them. More: lightning-eff plan --help
  budget                         the size and the tokens that FLOPs, accelerator-hours or money are best spent on.
                                 More: lightning-eff budget --help
  techniques                     everything that two surveys of efficient training name: what does it here, what it saves,
                                 what was measured of it. More: lightning-eff techniques --help
  recipe                         named sets of techniques, which adapt to a module: fit --recipe gpt.
                                 More: lightning-eff recipe --help

Modules are looked up from the current folder too. Errors are told in a paragraph; --debug gives the traceback.
--version prints the version.
"""
COMMANDS = ("fit", "validate", "test", "predict", "bench", "tune", "select", "plan", "budget", "techniques", "recipe")


def techniques_table(width: int, word: str = "", group: str = "") -> str:
    """The catalogue as a table of ``width`` columns (at least about 120), from what the classes say of themselves."""
    return catalogue.table(catalogue.chosen(word, group), width)


def _techniques(rest: Sequence[str]) -> None:
    """What the surveys name, and what does it here."""
    about = "What the two surveys of efficient training name, what does it here, what it saves, and what was measured of it."
    options = Arguments("lightning-eff techniques", description=about)
    options.add_argument(
        "--search", default="", metavar="WORD", help="only what has this word anywhere, such as memory"
    )
    options.add_argument("--group", default="", choices=GROUPS, metavar="GROUP", help=f"one of {', '.join(GROUPS)}")
    options.add_argument("--json", action="store_true", help="as JSON, with sources, tests and all figures")
    asked = options.parse_args(rest)
    found = catalogue.chosen(asked.search, asked.group)
    if not found and not asked.json:
        raise UsageError(
            f"got --search {asked.search}{f' in {asked.group}' if asked.group else ''}, which nothing has; expected a word of a"
            " technique's name, its source or what it saves, such as memory. Without options, everything is listed."
        )
    print(catalogue.as_json(found) if asked.json else catalogue.table(found, _width()))


def _width() -> int:
    return shutil.get_terminal_size((140, 24)).columns


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
    if argv == ["--version"]:
        print(f"lightning-eff {public.version()}")
    elif command == "techniques":
        _techniques(rest)
    elif command == "bench":
        from lightning_eff.bench.command import main as bench

        bench(rest, debug=debug)
    elif command == "tune":
        from lightning_eff.tune.command import main as tune

        tune(rest, debug=debug)
    elif command == "select":
        from lightning_eff._cli.select import main as select

        select(rest, debug=debug)
    elif command == "plan":
        from lightning_eff.planner.command import main as plan

        plan(rest, debug=debug)
    elif command == "budget":
        from lightning_eff.planner._launch.budget_command import main as budget

        budget(rest, debug=debug)
    elif command == "recipe":
        from lightning_eff.recipes.command import main as recipe

        recipe(rest)
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
        from lightning_eff._cli.config import ConfigCLI
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{error.name} is not installed; LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        ) from error

    from lightning_eff.monitor.training_report import TrainingReport

    # Lightning asks torch in a way that torch is about to drop: nothing that who trains here could mend
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    ConfigCLI(argv, last=[TrainingReport()], save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
