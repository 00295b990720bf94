"""The options of ``lightning-eff plan``, looked at as a whole before torch, Lightning or the user's module is imported."""

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_eff._cli.errors import Arguments
from lightning_eff._core._lightning.extras import install
from lightning_eff.planner._launch.assumptions import Assumptions
from lightning_eff.planner.accelerators import ACCELERATORS, Accelerator, find_accelerator

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
SYNONYMS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}

WITHOUT = (
    "Rematerialization",
    "ActivationCompression",
    "OptimizerOffload",
    "fp8",
    "shard",
    "tensor",
    "pipeline",
)
#: What ``--only`` takes, and how it reads a value.
ONLY: dict[str, Callable[[str], Any]] = {
    "dp": int,
    "tp": int,
    "pp": int,
    "shard": str,
    "shards": int,
    "schedule": str,
    "stages_per_rank": int,
    "micro_batch": int,
    "num_microbatches": int,
    "remat": str,
    "budget": float,
    "fp8": lambda text: {"true": True, "false": False}[text.lower()],
    "bits": int,
    "offload": lambda text: {"true": True, "false": False}[text.lower()],
}

_DESCRIPTION = """\
Which layout (data, sharded, tensor, pipeline; micro-batches, schedule, what is computed again) trains a recipe's module
fastest on so many accelerators? From a profile of the module on this machine, on shapes alone, and a table of accelerators;
every layout's memory is predicted, and the best are simulated operation by operation. No accelerator is needed.

  lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
"""
_DEFAULT = Assumptions()


@dataclass(frozen=True)
class Request:
    """What was asked for, checked.

    Attributes:
        options: as they were given.
        accelerator: of the table.
        assumptions: with what was set of them.
        only: values that a layout has to have.
        devices: accelerators in a node, all of which are used alike.
    """

    options: argparse.Namespace
    accelerator: Accelerator
    assumptions: Assumptions
    only: dict[str, Any]
    devices: int


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = Arguments(
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
    add("--precision", help=f"in place of the recipe's: {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    add("--fp8", action="store_true", help="linear layers multiply in FP8 (known of a recipe with such a plugin)")
    add(
        "--layers", metavar="PATH", help="path or pattern of the blocks, or several with commas; else the longest stack"
    )
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
        help="any other assumption: " + ", ".join(f"{name}={getattr(_DEFAULT, name)}" for name in _numbers()),
    )
    add(
        "--fused",
        action="store_true",
        help="take everything between two matmuls as one kernel, as torch.compile makes it; eager mode otherwise",
    )
    add(
        "--without",
        action="append",
        default=[],
        choices=WITHOUT,
        help="leave it out of the search; several times",
    )
    add(
        "--exact",
        action="store_true",
        help="leave out what changes gradients: FP8 and ActivationCompression",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"search only layouts with it; several times. Names: {', '.join(ONLY)}",
    )
    add(
        "--assume-pairs",
        action="store_true",
        help="tensor parallelism divides attention and MLP of the blocks in pairs, as the strategy tells at setup if it does;"
        " without, that is relied upon where the module carries a plan of its own (Hugging Face)",
    )
    add(
        "--out",
        metavar="YAML",
        help="write the best layout there, as a config for lightning-eff fit --config recipe.yaml --config YAML",
    )
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


def read(argv: Sequence[str]) -> Request:
    """Parse and check ``argv``, what follows ``plan``.

    Raises:
        ValueError: where an option or a value is wrong.
        FileNotFoundError: if a config is not there.
        ModuleNotFoundError: if something that the request needs is not installed.
    """
    options = parser().parse_args(argv)
    accelerator = find_accelerator(options.gpu)
    for name in ("gpus", "global_batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1.")
    precision = check_precision(options.precision) if options.precision is not None else None
    if options.fp8 and accelerator.fp8_matmul_flops is None:
        raise ValueError(no_fp8(accelerator))
    try:
        assumptions = Assumptions(
            fused=options.fused,
            **{"efficiency": options.efficiency, **_assumed(options.assume)},
        )
    except ValueError as error:
        raise ValueError(f"--efficiency or --assume: {error}") from None
    options.precision = precision
    for path in options.config:
        _check_config(path)
    outputs = (("--json", options.json), ("--timeline", options.timeline), ("--out", options.out))
    for option, path in outputs:
        if path is not None and path not in ("-", "none"):
            _check_output(option, path)
    if find_spec("jsonargparse") is None:
        raise ModuleNotFoundError(
            'jsonargparse is not installed; LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        )
    if options.timeline != "none" and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(NO_MATPLOTLIB)
    devices = max(d for d in range(1, min(accelerator.node_size, options.gpus) + 1) if options.gpus % d == 0)
    return Request(options, accelerator, assumptions, _only(options.only), devices)


NO_MATPLOTLIB = (
    "matplotlib, which draws the timeline, is not installed. Pass --timeline none, or run in a clone of lightning_eff:"
    f" {install('bench')}"
)


def no_fp8(accelerator: Accelerator) -> str:
    """What to say of FP8 where there is none."""
    able = ", ".join(a.name for a in ACCELERATORS.values() if a.fp8_matmul_flops is not None)
    return f"plan(gpu={accelerator.name}): it has no FP8, which the recipe or --fp8 asks for; choose one of {able}."


def check_precision(name: str | int | None) -> str:
    """The Trainer's name of a precision that a plan can be made for; None is Lightning's default.

    Raises:
        ValueError: for another one.
    """
    text = str(name if name is not None else "32-true")
    text = SYNONYMS.get(text, text)
    if text not in PRECISIONS:
        raise ValueError(
            f"plan(precision={name!r}): expected {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}; set one of them by"
            " --precision, for the plan only."
        )
    return text


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """The nearest of what is known, as the end of a message; nothing if none is near."""
    near = difflib.get_close_matches(given, known, 1)
    return f" Did you mean {near[0]}?" if near else ""


def _numbers() -> list[str]:
    return [f.name for f in fields(Assumptions) if f.type is float]


def _assumed(texts: Sequence[str]) -> dict[str, float]:
    """``NAME=VALUE``, several times."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = "" if name in _numbers() else name
        if name not in _numbers():
            expected = f"expected NAME=NUMBER with one of {', '.join(_numbers())}."
            raise ValueError(f"--assume {text}: {expected}{did_you_mean(name, _numbers()) if name else ''}")
    return found


def _only(texts: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE``, several times."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = ONLY[name](value)
        except (KeyError, ValueError):
            expected = f"expected NAME=VALUE with one of {', '.join(ONLY)}, and a value of its kind."
            raise ValueError(f"--only {text}: {expected}{did_you_mean(name, list(ONLY))}") from None
    return found


def _check_config(path: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file; expected a config of LightningCLI.")
    import yaml

    try:
        content: Any = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: it is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"--config {path}: it holds a {type(content).__name__}; expected a mapping with model:, data: and trainer:, as"
            " LightningCLI has it."
        )


def _check_output(option: str, path: str) -> None:
    """That a file can be written there, before minutes of searching are spent on it."""
    where = Path(path)
    if where.is_dir():
        raise ValueError(f"{option} {path}: that is a folder; expected the path of a file.")
    folder = where.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(where if where.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {path}: it cannot be written; expected a file in a folder that is yours to write.")
