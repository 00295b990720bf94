"""The options of ``lightning-eff plan``, checked before torch, Lightning or the user's module is imported."""

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
#: The names that ``--only`` accepts, with a parser for each value.
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
Find the layouts that train a recipe's module fastest on a number of accelerators. A layout sets data, sharded, tensor and
pipeline parallelism, micro-batches, the pipeline schedule and rematerialization. The command profiles the module on this
machine, predicts the memory of every layout, and simulates the best ones operation by operation. No accelerator is needed.

  lightning-eff plan --config recipe.yaml --gpus 512 --gpu h200
"""
_DEFAULT = Assumptions()


@dataclass(frozen=True)
class Request:
    """A checked request for a plan.

    Attributes:
        options: the parsed options.
        accelerator: the table's entry for ``--gpu``.
        assumptions: the defaults, changed by the options.
        only: required values of a layout's fields.
        devices: accelerators used in each node.
    """

    options: argparse.Namespace
    accelerator: Accelerator
    assumptions: Assumptions
    only: dict[str, Any]
    devices: int


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    options = Arguments(
        "lightning-eff plan", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add(
        "--config",
        required=True,
        action="append",
        metavar="YAML",
        help="LightningCLI config; repeat the option to merge",
    )
    add("--gpus", required=True, type=int, metavar="N", help="total number of accelerators")
    add("--gpu", required=True, metavar="NAME", help=f"type of accelerator: {', '.join(ACCELERATORS)}")
    add(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples per step (default: as under DDP, the recipe's batch size x its accumulation x --gpus)",
    )
    add("--precision", help=f"replace the recipe's precision: {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    add("--fp8", action="store_true", help="multiply linear layers in FP8 (implied by a recipe with an FP8 plugin)")
    add(
        "--layers",
        metavar="PATH",
        help="path or pattern of the blocks, several separated by commas (default: the longest stack)",
    )
    add(
        "--efficiency",
        type=float,
        default=_DEFAULT.efficiency,
        help="matmul speed in the module, as a fraction in (0, 1] of the best matmul measured on the accelerator; it limits"
        f" the MFU (default: {_DEFAULT.efficiency}, from a layer measured by Korthikanti et al. 2022)",
    )
    add(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set another assumption: " + ", ".join(f"{name}={getattr(_DEFAULT, name)}" for name in _numbers()),
    )
    add(
        "--fused",
        action="store_true",
        help="assume that torch.compile fuses everything between two matmuls into one kernel (default: eager mode)",
    )
    add(
        "--without",
        action="append",
        default=[],
        choices=WITHOUT,
        help="exclude it from the search; can be repeated",
    )
    add(
        "--exact",
        action="store_true",
        help="exclude options that change gradients: FP8 and ActivationCompression",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"search only layouts with this value; can be repeated. Names: {', '.join(ONLY)}",
    )
    add(
        "--assume-pairs",
        action="store_true",
        help="assume that tensor parallelism divides attention and MLP in pairs, which the strategy reports at setup (default:"
        " only if the module has its own plan, as in Hugging Face)",
    )
    add(
        "--out",
        metavar="YAML",
        help="write the best layout as a config for lightning-eff fit --config recipe.yaml --config YAML",
    )
    add(
        "--profile",
        choices=("fake", "real"),
        default="fake",
        help="profile the training step on shapes without data, or on real data if it reads values (default: fake)",
    )
    add(
        "--timeline",
        default="lightning_logs/plan/timeline.png",
        metavar="PNG",
        help="draw a step of the best layout; none skips the picture (default: lightning_logs/plan/timeline.png)",
    )
    add(
        "--json",
        metavar="FILE",
        help="also write all results as JSON; - prints JSON instead of the report",
    )
    add("--quiet", action="store_true", help="show no progress")
    return options


def read(argv: Sequence[str]) -> Request:
    """Parse and check ``argv``, the arguments after ``plan``.

    Raises:
        ValueError: if an option or a value is wrong.
        FileNotFoundError: if a config does not exist.
        ModuleNotFoundError: if a required package is not installed.
    """
    options = parser().parse_args(argv)
    accelerator = find_accelerator(options.gpu)
    for name in ("gpus", "global_batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1. Pass a positive number.")
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
            'jsonargparse is not installed, and LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        )
    if options.timeline != "none" and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(NO_MATPLOTLIB)
    devices = max(d for d in range(1, min(accelerator.node_size, options.gpus) + 1) if options.gpus % d == 0)
    return Request(options, accelerator, assumptions, _only(options.only), devices)


NO_MATPLOTLIB = (
    "matplotlib is not installed, and the timeline needs it. Pass --timeline none, or run in a clone of lightning_eff:"
    f" {install('bench')}"
)


def no_fp8(accelerator: Accelerator) -> str:
    """Return the message for an accelerator without FP8."""
    able = ", ".join(a.name for a in ACCELERATORS.values() if a.fp8_matmul_flops is not None)
    return f"--gpu {accelerator.name}: it has no FP8, which the recipe or --fp8 requires. Choose one of {able}."


def check_precision(name: str | int | None) -> str:
    """Return the Trainer's full name for a precision; None means Lightning's default.

    Raises:
        ValueError: if plans do not support the precision.
    """
    text = str(name if name is not None else "32-true")
    text = SYNONYMS.get(text, text)
    if text not in PRECISIONS:
        raise ValueError(
            f"plan(precision={name!r}): expected {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}. Pass one of them as"
            " --precision, which changes only the plan."
        )
    return text


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """Return " Did you mean ...?" with the closest known name, or an empty string."""
    near = difflib.get_close_matches(given, known, 1)
    return f" Did you mean {near[0]}?" if near else ""


def _numbers() -> list[str]:
    return [f.name for f in fields(Assumptions) if f.type is float]


def _assumed(texts: Sequence[str]) -> dict[str, float]:
    """Parse the values of ``--assume``, each ``NAME=VALUE``."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = "" if name in _numbers() else name
        if name not in _numbers():
            expected = f"expected NAME=NUMBER. Names: {', '.join(_numbers())}."
            raise ValueError(f"--assume {text}: {expected}{did_you_mean(name, _numbers()) if name else ''}")
    return found


def _only(texts: Sequence[str]) -> dict[str, Any]:
    """Parse the values of ``--only``, each ``NAME=VALUE``."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = ONLY[name](value)
        except (KeyError, ValueError):
            expected = f"expected NAME=VALUE with a value of the right type. Names: {', '.join(ONLY)}."
            raise ValueError(f"--only {text}: {expected}{did_you_mean(name, list(ONLY))}") from None
    return found


def _check_config(path: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: no such file. Pass the path of a LightningCLI config.")
    import yaml

    try:
        content: Any = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"--config {path}: it contains a {type(content).__name__}. Pass a LightningCLI config, a mapping with model:,"
            " data: and trainer:."
        )


def _check_output(option: str, path: str) -> None:
    """Check that the file can be written, before the search spends minutes."""
    where = Path(path)
    if where.is_dir():
        raise ValueError(f"{option} {path}: it is a folder. Pass the path of a file.")
    folder = where.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(where if where.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {path}: it cannot be written. Pass a file in a folder that you may write to.")
