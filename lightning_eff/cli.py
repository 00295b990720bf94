"""The ``lightning-eff`` command: LightningCLI's commands with short names for the techniques, and the package's own."""

import shutil
import sys
import warnings
from collections.abc import Sequence

from lightning_eff._catalogue import catalogue
from lightning_eff._catalogue.groups import GROUPS
from lightning_eff._cli.errors import Arguments, UsageError, check_configs, did_you_mean, told
from lightning_eff._exports import public

_USAGE = """\
usage: lightning-eff {fit,validate,test,predict} --config recipe.yaml [options of LightningCLI]
       lightning-eff advise --config mine.yaml
       lightning-eff bench --baseline a.yaml --recipe b.yaml --target val_loss --budget 120s --seeds 3
       lightning-eff tune --baseline a.yaml --target val_loss --budget 120s --search 2h
       lightning-eff select dsir --raw crawl.txt --target books.txt --keep 0.1 --out kept.npz
       lightning-eff merge seed0.ckpt seed1.ckpt --out soup.ckpt
       lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
       lightning-eff budget --hours 5000 --gpu h100
       lightning-eff techniques --search memory
       lightning-eff recipe {list,show gpt}

  fit, validate, test, predict   run the module and data of a LightningCLI config. List techniques in trainer.callbacks and
                                 precision plugins in trainer.plugins, by class name. More: lightning-eff fit --help
  advise                         measure for three minutes what makes a config's run faster without changing its numbers, and
                                 list problems of the run. More: lightning-eff advise --help
  bench                          measure how much faster a recipe trains than its baseline, with a confidence interval.
                                 More: lightning-eff bench --help
  tune                           search for the best recipe for a config, and confirm it. More: lightning-eff tune --help
  select                         choose the samples of a data set to train on, by text or by a module's scores, and write
                                 them for SampleSubset. More: lightning-eff select --help
  merge                          average the weights of several runs, and evaluate the result.
                                 More: lightning-eff merge --help
  plan                           find the fastest layout for a number of accelerators by simulation, without using one.
                                 More: lightning-eff plan --help
  budget                         find the model size and the number of tokens for FLOPs, accelerator-hours or money.
                                 More: lightning-eff budget --help
  techniques                     list the methods of two surveys of efficient training: which technique implements each, what
                                 it saves, and measured results. More: lightning-eff techniques --help
  recipe                         list the recipes that fit --recipe NAME takes, or show one as Python and YAML. More:
                                 lightning-eff recipe --help

Modules in the current folder are found too. An error prints one paragraph; --debug prints the traceback.
--version prints the version.
"""
COMMANDS = (
    "fit",
    "validate",
    "test",
    "predict",
    "advise",
    "bench",
    "tune",
    "select",
    "merge",
    "plan",
    "budget",
    "techniques",
    "recipe",
)


def _techniques(rest: Sequence[str]) -> None:
    """Print the methods of the surveys and the techniques that implement them."""
    about = "List the methods of two surveys of efficient training: which technique implements each, its savings and results."
    options = Arguments("lightning-eff techniques", description=about)
    options.add_argument(
        "--search", default="", metavar="WORD", help="list only entries with this word, such as memory"
    )
    options.add_argument("--group", default="", choices=GROUPS, metavar="GROUP", help=f"one of {', '.join(GROUPS)}")
    options.add_argument("--json", action="store_true", help="print JSON with sources, tests and all figures")
    asked = options.parse_args(rest)
    found = catalogue.chosen(asked.search, asked.group)
    if not found and not asked.json:
        raise UsageError(
            f"--search {asked.search}: no entry{f' of {asked.group}' if asked.group else ''} has this word. Search for part of"
            " a name, a source or a saving, such as memory, or remove the options to list everything."
        )
    print(catalogue.as_json(found) if asked.json else catalogue.table(found, _width()))


def _width() -> int:
    return shutil.get_terminal_size((140, 24)).columns


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; ``args`` default to ``sys.argv[1:]``.

    Raises:
        SystemExit: after one paragraph on standard error. Status 2 means wrong arguments or a wrong config, and status 1 a
            run that failed. With ``--debug`` the error itself is raised.
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
    elif command == "advise":
        from lightning_eff.advice.command import main as advise

        advise(rest, debug=debug)
    elif command == "bench":
        from lightning_eff.bench.command import main as bench

        bench(rest, debug=debug)
    elif command == "tune":
        from lightning_eff.tune.command import main as tune

        tune(rest, debug=debug)
    elif command == "select":
        from lightning_eff._cli.select import main as select

        select(rest, debug=debug)
    elif command == "merge":
        from lightning_eff._cli.merge import main as merge

        merge(rest, debug=debug)
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
    """Run one of LightningCLI's commands."""
    check_configs(argv)
    try:
        from lightning_eff._cli.config import ConfigCLI
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{error.name} is not installed, and LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        ) from error

    from lightning_eff.monitor.training_report import TrainingReport

    # Lightning uses a check that torch deprecates; users cannot do anything about the warning
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    ConfigCLI(argv, last=[TrainingReport()], save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
