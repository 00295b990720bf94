"""LightningCLI as this package's commands run it: what a config cannot mean is said in one paragraph."""

import difflib
import importlib
import inspect
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

from lightning_eff import _public
from lightning_eff._errors import ConfigError, UsageError, check_configs, did_you_mean

#: Where each kind of class belongs in a config.
_PLACES = (
    (Callback, "callback", "callbacks"),
    (Precision, "precision plugin", "plugins"),
    (Strategy, "strategy", "strategy"),
)
_NOISE = re.compile(
    r"Expected a <class 'NoneType'>|Not a valid subclass of|Expected a path but|Expected a <class 'list'>|Expected a list"
)

_MISPLACED = re.compile(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)")


class ConfigParser(LightningArgumentParser):
    """Raises :class:`ConfigError`, and takes options only where they are written out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": "lightning-eff", **kwargs})

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        raise ConfigError(explained(message, parser)) from ex


class EpochBar(RichProgressBar):
    """Lightning's bar, which tells of how many epochs only where the run has a number of them: else it says "Epoch 0/-2"."""

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        text = super()._get_train_description(current_epoch)
        return text if self.trainer.max_epochs != -1 else text.replace("/-2", "").ljust(len(text))


class ConfigCLI(LightningCLI):
    """LightningCLI over any module and data named by class path; short names of everything exported are known.

    Args:
        args: those of the command line.
        last: callbacks that come after all others, the progress bar too.
        kwargs: LightningCLI's.
    """

    def __init__(self, args: list[str], last: Sequence[Callback] = (), **kwargs: Any) -> None:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        self.last = last
        # without a class of datamodules any one may be named, and none need be: a module may have loaders of its own
        super().__init__(LightningModule, subclass_mode_model=True, parser_class=ConfigParser, args=args, **kwargs)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        for bar in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if type(bar) is RichProgressBar:
                bar.__class__ = EpochBar  # with the settings that it was given
        trainer.callbacks.extend(self.last)  # pyright: ignore[reportAttributeAccessIssue]
        return trainer

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        check_configs(args)
        self.config = parser.parse_args(args)  # these are the command line's own; Lightning would warn of others

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config[str(self.subcommand)].get("trainer")
        name = None if trainer is None else trainer.get("strategy")
        if isinstance(name, str) and name != "auto" and name.lower() not in StrategyRegistry:
            known = ["auto", *StrategyRegistry.available_strategies()]
            near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5) or known[:6]
            raise UsageError(
                f"trainer.strategy: got {name!r}, which is no strategy's name nor a class path."
                f"{did_you_mean(name, known)} Names near to it: {', '.join(near)}."
            )
        super().before_instantiate_classes()


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a config, as jsonargparse words it.

    Attributes:
        text: what is wrong.
        key: where, as ``trainer.callbacks``; empty where that is not said.
        class_path: of the class whose arguments these are, if any.
        given: the value, where it is told apart.
    """

    text: str
    key: str = ""
    class_path: str = ""
    given: str = ""


def explained(message: str, parser: Any) -> str:
    """jsonargparse's ``message`` in one paragraph, with the nearest names that would have been right."""
    found = faults(message)
    telling = [fault for fault in found if not _NOISE.match(fault.text)] or found[:1]
    typed = [fault for fault in telling if fault.text.startswith("Expected a <class")]
    if len(typed) > 1 and len(typed) == len(telling):  # the kinds that a value may be of
        kinds = " or ".join(dict.fromkeys(re.findall(r"<class '(?:\w+\.)*(\w+)'>", " ".join(f.text for f in typed))))
        telling = [replace(typed[0], text=f"Expected {kinds}")]
    inside = [fault for fault in telling if not _is_of_another_kind(fault)]
    return " ".join(dict.fromkeys(_sentence(fault, parser) for fault in inside or telling))


def _is_of_another_kind(fault: Fault) -> bool:
    """Whether a union's alternative is none since the class, which exists, is of another kind."""
    name = re.match(r"Expected a dot import path string: (\S+)", fault.text)
    return bool(_MISPLACED.match(fault.text)) or (name is not None and name[1] in _public.HOMES)


def faults(message: str) -> list[Fault]:
    """What a message of jsonargparse names as wrong, the alternatives of a union one by one."""
    text = textwrap.dedent(message).strip()
    head, _, rest = text.partition("\n")
    if text.startswith("- "):
        parts = re.split(r"(?:^|\n)- ", text)[1:]
        return [fault for part in parts for fault in faults(_continued(part))]
    if match := re.match(r'Parser key "([^"]+)":\s*', text):
        inner = faults(_continued(text[match.end() :], at_start=True))
        return [replace(f, key=f"{match[1]}.{f.key}" if f.key else match[1]) for f in inner]
    if head.startswith("Does not validate against any of the Union subtypes"):
        errors, _, tail = rest.partition("\nErrors:\n")[2].rpartition("\nGiven value type:")
        given = tail.partition("\nGiven value: ")[2]
        return [fault if fault.given else replace(fault, given=given) for fault in faults(errors)]
    if match := re.match(r"Problem with given class_path '([^']+)':\n", text):
        return [f if f.class_path else replace(f, class_path=match[1]) for f in faults(text[match.end() :])]
    return [Fault(text)]


def _continued(text: str, *, at_start: bool = False) -> str:
    """A bullet's text, whose later lines are indented below the first."""
    head, newline, rest = text.partition("\n")
    if at_start and text[:1].isspace():
        return textwrap.dedent(text)
    return head + newline + textwrap.dedent(rest)


def _sentence(fault: Fault, parser: Any) -> str:
    text, where = fault.text, f"{fault.key}: " if fault.key else ""
    if match := re.match(r"Expected a dot import path string: (\S+)", text):
        return where + _unknown_class(match[1], fault.key)
    if match := _MISPLACED.match(text):
        return where + _misplaced(match[1] or fault.given, match[2])
    if match := re.match(r"(?:Option '([^']+)' is not accepted|Key '([^']+)' is not expected)", text):
        return where + _unknown_argument(match[1] or match[2], fault.class_path)
    if match := re.match(r"module '([^']+)' has no attribute '([^']+)'", text):
        return where + _missing(match[1], match[2], fault.class_path)
    if match := re.match(r"No module named '([^']+)'", text):
        return where + _no_module(match[1], fault.class_path)
    if match := re.match(r"Subcommand '\w+' does not accept option '([^']+)'|unrecognized arguments: (\S+)", text):
        return _unknown_option(match[1] or match[2].partition("=")[0], parser, option=match[1] is None)
    if match := re.match(r"the following arguments are required: (.+)", text, re.S):
        names = [name.partition(".")[2] or name for name in match[1].split(", ")]
        return f"{' and '.join(sorted(names))} must be given: in a file, --config recipe.yaml, or as an option of that name."
    if text.startswith("Problems parsing config: "):
        return f"a config is no YAML: {_line(text.partition(': ')[2])}."
    if text.startswith("Unexpected config: "):
        return (
            f"a config holds {_line(text.partition(': ')[2])[:80]!r}; expected a mapping, such as trainer: and model:."
        )
    given = f" Got {fault.given}." if 0 < len(fault.given) <= 80 and "Got value" not in text else ""
    about = f"{fault.class_path}: " if fault.class_path else ""
    words = _line(re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)).replace("typing.", "").replace(" a int", " an int")
    return f"{where}{about}{words}{'' if words.endswith('.') else '.'}{given}"


def _unknown_class(name: str, key: str) -> str:
    if name in _public.HOMES:
        return _misplaced(name, "")
    known = {name for name in _public.HOMES if inspect.isclass(_public.found(name))}
    for base in (Callback, Precision, Strategy, LightningModule, LightningDataModule):
        known |= {cls.__name__ for cls in _subclasses(base) if not cls.__name__.startswith("_")}
    return (
        f"there is no class known as {name!r}.{did_you_mean(name, known)} Expected the name of a technique"
        " (`lightning-eff techniques` lists them) or of one of Lightning's classes, or a class path such as"
        " package.module.Class."
    )


def _misplaced(path: str, expected: str) -> str:
    cls = _imported(path)
    for base, kind, place in _PLACES:
        if inspect.isclass(cls) and issubclass(cls, base):
            return f"{path} is a {kind}; expected it under trainer.{place}."
    return f"{path} is no {expected or 'class that belongs here'}."


def _missing(module: str, name: str, class_path: str) -> str:
    """``module`` has no ``name``, which is the class that ``class_path`` ends in, or a module on the way to it."""
    if class_path and not class_path.endswith(f".{name}"):
        return _no_module(f"{module}.{name}", class_path)
    classes = {key: value for key, value in vars(sys.modules[module]).items() if inspect.isclass(value)}
    own = [key for key, cls in classes.items() if cls.__module__ == module]
    return f"{module!r} has no class {name!r}.{did_you_mean(name, classes)} It defines {_listed(own) or 'none'}."


def _no_module(name: str, class_path: str) -> str:
    package, _, last = name.rpartition(".")
    there = importlib.import_module(package).__path__ if package in sys.modules else None
    around = {module.name for module in pkgutil.iter_modules(there)}
    if there is None:
        last = name.partition(".")[0]
        around |= {entry.name for entry in os.scandir() if entry.is_dir()}
    asked = f", which {class_path} asks for" if class_path else ""
    return (
        f"there is no module {name!r}{asked}; expected one that is installed or lies in the current folder."
        f"{did_you_mean(last, around - {last})}"
    )


def _unknown_argument(name: str, class_path: str) -> str:
    try:
        taken = _arguments(_imported(class_path))
    except (ImportError, AttributeError, ValueError):
        taken = []
    expected = f" Expected init_args among {_listed(taken)}." if taken else ""
    return f"{class_path} has no argument {name!r}.{did_you_mean(name, taken)}{expected}"


def _imported(path: str) -> Any:
    """What a dotted path, or the name of something exported, stands for."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name) if module else _public.found(name)


def _arguments(cls: Any) -> list[str]:
    """Names that a class's constructor takes, and those of the constructors that it hands keyword arguments on to."""
    names: dict[str, None] = {}
    for base in inspect.getmro(cls):
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(base.__init__).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names.update(dict.fromkeys(p.name for p in parameters if p.kind in named and p.name != "self"))
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _unknown_option(name: str, parser: Any, *, option: bool) -> str:
    word = name.lstrip("-")
    known = [action.dest for action in parser._actions if action.dest not in ("help", "subcommand")]
    near = did_you_mean(word, known)
    if near and option:
        near = near.replace("'", "'--", 1)
    what = f"option {name!r}" if option else f"key {name!r}"
    tops = dict.fromkeys(key.partition(".")[0] for key in known)
    return f"there is no {what}.{near or f' Expected one of the sections {_listed(tops)}.'}"


def _subclasses(base: type) -> set[type]:
    return {cls for direct in base.__subclasses__() for cls in {direct, *_subclasses(direct)}}


def _listed(names: Any, most: int = 20) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _line(text: str) -> str:
    return " ".join(text.split())
