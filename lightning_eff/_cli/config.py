"""The LightningCLI of this package's commands, which explains errors in a config in one paragraph."""

import difflib
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NoReturn, Self, get_args, get_origin

import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._cli.errors import ConfigError, UsageError, check_configs, did_you_mean
from lightning_eff._cli.faults import ENTRY, Fault, entry_key, faults, misshapen
from lightning_eff._cli.packages import package_of_module
from lightning_eff._cli.yaml_loading import MODE
from lightning_eff._core._lightning.names import (
    OTHER,
    OWN,
    adapt,
    adapted,
    both,
    is_exactly,
    is_lightnings,
    is_subclass,
    like,
    module_like,
    package_of,
    renamed,
)
from lightning_eff._exports import public
from lightning_eff.recipes import in_config
from lightning_eff.strategies._names import meant, sized

#: Each kind of class, its description, and its place in a config.
_PLACES = (
    (Callback, "a callback", "trainer.callbacks"),
    (Precision, "a precision plugin", "trainer.plugins"),
    (Strategy, "a strategy", "trainer.strategy"),
    (Logger, "a logger", "trainer.logger"),
    (LightningModule, "a module", "model"),
    (LightningDataModule, "a data module", "data"),
    (Optimizer, "an optimizer", "ReplaceOptimizer in trainer.callbacks"),
)
_NOISE = re.compile(
    r"Expected a <class 'NoneType'>|Not a valid subclass of|Expected a path but|Expected a <class 'list'>|Expected a list"
    r"|Expected an instantiatable class"
)

_MISPLACED = re.compile(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)")


class ConfigParser(LightningArgumentParser):
    """A parser that raises :class:`ConfigError`, and requires full option names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": "lightning-eff", **kwargs})
        self.parser_mode = MODE

    @override
    def add_lightning_class_args(self, lightning_class: Any, nested_key: str, *args: Any, **kwargs: Any) -> list[str]:
        if nested_key == "data" and lightning_class in both(LightningDataModule):  # one of either package will do
            kinds: Any = both(LightningDataModule)
            self.add_subclass_arguments(kinds, nested_key, fail_untyped=False, required=False)
            return []
        return super().add_lightning_class_args(lightning_class, nested_key, *args, **kwargs)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        raise ConfigError(explained(message, parser)) from ex


class EpochBar(RichProgressBar):
    """Lightning's progress bar, without the "/-2" that it prints if the number of epochs is not limited."""

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        text = super()._get_train_description(current_epoch)
        return text if self.trainer.max_epochs != -1 else text.replace("/-2", "").ljust(len(text))


class ConfigCLI(LightningCLI):
    """A LightningCLI for any module and data, which knows the short names of everything that this package exports.

    It derives from the LightningCLI of the Lightning package that the module uses.

    Args:
        args: the command line's arguments.
        last: callbacks to run after all others, including the progress bar.
        kwargs: arguments of LightningCLI.
    """

    @override
    def __new__(cls, args: list[str], *others: Any, **kwargs: Any) -> Self:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return super().__new__(adapted(cls, package_of_module(args)))

    def __init__(self, args: list[str], last: Sequence[Callback] = (), **kwargs: Any) -> None:
        self.last = last
        # no datamodule class is required, since a module can have its own loaders
        kinds: dict[str, Any] = {
            "model_class": like(self, LightningModule),
            "parser_class": adapted(ConfigParser, package_of(self)),
        }
        super().__init__(**kinds, subclass_mode_model=True, args=args, **kwargs)

    @override
    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        if self.datamodule is not None:
            adapt(self.datamodule, self.model)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        for bar in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if is_exactly(bar, RichProgressBar):
                bar.__class__ = adapted(EpochBar, package_of(bar))  # with the settings that it was given
        if (name := self._get(self.config, "recipe")) is not None:
            config = self.config[str(self.subcommand)]
            in_config.take(name, config, trainer, self.model, self.datamodule)
        trainer.callbacks.extend(self.last)  # pyright: ignore[reportAttributeAccessIssue]
        return trainer

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--recipe", type=str | None, default=None, help=in_config.HELP)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        check_configs(args)
        self.config = parser.parse_args(args)  # without Lightning's warning about arguments that are not sys.argv

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config[str(self.subcommand)].get("trainer")
        name = None if trainer is None else trainer.get("strategy")
        registry = module_like(self, "lightning.pytorch.strategies").StrategyRegistry
        if isinstance(name, str) and name != "auto" and name.lower() not in registry and sized(name) is None:
            known = ["auto", *registry.available_strategies()]
            known = [right, *known] if (right := meant(name, known)) is not None else known
            near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5) or known[:6]
            raise UsageError(
                f"trainer.strategy: got {name!r}, which is neither the name of a strategy nor a class path."
                f"{did_you_mean(name, known)} Similar names: {', '.join(near)}."
            )
        super().before_instantiate_classes()


def explained(message: str, parser: Any) -> str:
    """Rewrite jsonargparse's ``message`` as one paragraph that suggests the closest valid names."""
    found = faults(message)
    telling = [fault for fault in found if not _NOISE.match(fault.text)] or found[:1]
    for fault in found:
        if (match := _MISPLACED.match(fault.text)) and (other := _of_the_other(match[1] or fault.given, match[2])):
            return f"{fault.key}: {other}"
    for fault in telling:
        if (entry := misshapen(fault)) is not None:
            return f"{fault.key}: {_of_entry(entry)}"
    typed = [fault for fault in telling if fault.text.startswith("Expected a <class")]
    if len(typed) > 1 and len(typed) == len(telling):  # the possible types of a value
        kinds = " or ".join(dict.fromkeys(re.findall(r"<class '(?:\w+\.)*(\w+)'>", " ".join(f.text for f in typed))))
        telling = [replace(typed[0], text=f"Expected {kinds}")]
    inside = [fault for fault in telling if not _is_of_another_kind(fault)]
    return " ".join(dict.fromkeys(_sentence(fault, parser) for fault in inside or telling))


def _is_of_another_kind(fault: Fault) -> bool:
    """Whether a union's alternative fails because the class exists but has another kind."""
    name = re.match(r"Expected a dot import path string: (\S+)", fault.text)
    return bool(_MISPLACED.match(fault.text)) or (name is not None and name[1] in public.HOMES)


def _sentence(fault: Fault, parser: Any) -> str:
    text, where = fault.text, f"{fault.key}: " if fault.key else ""
    if match := re.match(r"Expected a dot import path string: (\S+)", text):
        return where + _unknown_class(match[1], fault.key)
    if match := _MISPLACED.match(text):
        return where + _misplaced(match[1] or fault.given, match[2])
    if match := re.match(r"Expected '([^']+)' to be a subclass of <class '(\w+)'>", text):
        return where + _misplaced(match[1], match[2])
    if match := re.match(r"Expected '([^']+)' to be a function that returns <class '(\w+)'>", text):
        return where + _unannotated(match[1], match[2])
    if match := re.match(r"Expected '([^']+)' to be a class that instantiates into callable", text):
        return f"{where}{match[1]} is a class whose objects cannot be called; expected a function, or a class with __call__."
    if fault.unknown:
        return where + _unknown_argument(fault.unknown, fault.class_path)
    if match := re.match(r"module '([^']+)' has no attribute '([^']+)'", text):
        return where + _missing(match[1], match[2], fault.class_path)
    if match := re.match(r"No module named '([^']+)'", text):
        return where + _no_module(match[1], fault.class_path)
    if match := re.match(r"Subcommand '\w+' does not accept option '([^']+)'|unrecognized arguments: (\S+)", text):
        return _unknown_option(match[1] or match[2].partition("=")[0], parser, option=match[1] is None)
    if match := re.match(r"the following arguments are required: (.+)", text, re.S):
        if fault.class_path:
            return _required(match[1].split(", "), fault)
        names = [name.partition(".")[2] or name for name in match[1].split(", ")]
        return f"{' and '.join(sorted(names))} must be given: in a file, --config recipe.yaml, or as an option of that name."
    if text.startswith("Problems parsing config: "):
        return f"a config is not valid YAML: {_line(text.partition(': ')[2])}."
    if text.startswith("Unexpected config: "):
        return (
            f"a config contains {_line(text.partition(': ')[2])[:80]!r}; expected a mapping with trainer: and model:."
        )
    given = f" Got {fault.given}." if 0 < len(fault.given) <= 80 and "Got value" not in text else ""
    about = f"{fault.class_path}: " if fault.class_path else ""
    words = _line(re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)).replace("typing.", "").replace(" a int", " an int")
    return f"{where}{about}{words}{'' if words.endswith('.') else '.'}{given}"


def _of_entry(entry: dict[str, Any]) -> str:
    """Explain the wrong keys of ``entry``, which should describe an object."""
    for key in entry:
        if right := entry_key(key):
            return f"an entry has no key {key!r}. Did you mean {right!r}? Expected class_path and init_args."
    loose = {key: value for key, value in entry.items() if key not in ENTRY}
    if "class_path" in entry:
        right = {"class_path": entry["class_path"], "init_args": {**(entry.get("init_args") or {}), **loose}}
        return f"got {_listed(loose)} next to class_path; expected {_in_a_line(right)}."
    (name, arguments), *_ = loose.items()
    right = {"class_path": name, **({"init_args": arguments} if arguments else {})}
    return f"got {name!r} as a key; expected {_in_a_line(right)}."


def _required(names: Sequence[str], fault: Fault) -> str:
    """Explain which required arguments are missing, with an example."""
    try:
        cls = _imported(fault.class_path)
    except (ImportError, AttributeError):
        cls = None
    example = {"class_path": fault.class_path, "init_args": {name: _example(cls, name) for name in names}}
    return (
        f"{fault.class_path.rpartition('.')[2]} in {fault.key} needs {' and '.join(map(repr, names))}: expected"
        f" {'it' if len(names) == 1 else 'them'} under its init_args, such as {_in_a_line(example)}."
    )


def _example(cls: Any, name: str) -> Any:
    """Return an example for an argument: a value from its search space, or its type."""
    tried = getattr(getattr(cls, "search_space", None), "settings", {}).get(name)
    if tried is not None:
        return tried.corners()[0]
    try:
        kind = inspect.signature(cls).parameters[name].annotation
    except (KeyError, TypeError, ValueError):
        return "..."
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    words = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return "..." if kind is inspect.Parameter.empty else f"<{words}>"


def _in_a_line(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _unknown_class(name: str, key: str) -> str:
    if name in public.HOMES:
        return _misplaced(name, "")
    known = {name for name in public.HOMES if inspect.isclass(public.found(name))}
    for base, _, _ in _PLACES:
        known |= {cls.__name__ for kind in both(base) for cls in _subclasses(kind) if not cls.__name__.startswith("_")}
    if hasattr(torch.optim, name):
        return _misplaced(f"torch.optim.{name}", "")
    return (
        f"there is no class {name!r}.{did_you_mean(name, known)} Expected the name of a technique (`lightning-eff"
        " techniques` lists them), the name of a Lightning class, or a class path such as package.module.Class."
    )


def _misplaced(path: str, expected: str) -> str:
    cls = _imported(path)
    for base, kind, place in _PLACES:
        if inspect.isclass(cls) and is_subclass(cls, base):
            way = ""
            if base is Optimizer:
                inner = {"class_path": path if "." in path else f"lightning_eff.{path}"}
                way = f": {_in_a_line({'class_path': 'ReplaceOptimizer', 'init_args': {'optimizer': inner}})}"
            return f"{path} is {kind}; expected it under {place}{way}."
    return f"{path} is not {_a(expected) if expected else 'a class that belongs here'}."


def _of_the_other(path: str, expected: str) -> str | None:
    """Explain the fix if a class has the expected kind, but comes from the other Lightning package."""
    try:
        cls = _imported(path)
    except (ImportError, AttributeError, KeyError):
        return None
    base = next((base for base, _, _ in _PLACES if base.__name__ == expected), None)
    if base is None or not inspect.isclass(cls) or not is_subclass(cls, base):
        return None
    package = package_of(cls)
    right = OWN if package == OTHER else OTHER
    way = f"Write {renamed(cls, right)}" if is_lightnings(cls) else f"Derive it from {renamed(base, right)}"
    return f"{path} is a class of {package}, but the module uses {right}. {way}."


def _unannotated(path: str, returns: str) -> str:
    """Explain that a function in a config needs a return annotation."""
    name = path.rpartition(".")[2]
    return f"{path} has no return annotation {returns}; expected the definition def {name}(...) -> {returns}."


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'AEIOU' else 'a'} {word}"


def _missing(module: str, name: str, class_path: str) -> str:
    """Explain that ``module`` has no ``name``, which is the last part of ``class_path`` or a module before it."""
    if class_path and not class_path.endswith(f".{name}"):
        return _no_module(f"{module}.{name}", class_path)
    kind, fits = ("class", inspect.isclass) if name[:1].isupper() else ("function", inspect.isfunction)
    there = {key: value for key, value in vars(sys.modules[module]).items() if fits(value) and key[0] != "_"}
    own = [key for key, value in there.items() if value.__module__ == module]
    if module == "lightning_eff":  # the package loads its names lazily, so vars() does not have them
        hint = did_you_mean(name, public.HOMES)
        return f"{module!r} has no {kind} {name!r}.{hint} `lightning-eff techniques` lists the techniques."
    return f"{module!r} has no {kind} {name!r}.{did_you_mean(name, there)} It has {_listed(own or there) or 'none'}."


def _no_module(name: str, class_path: str) -> str:
    package, _, last = name.rpartition(".")
    there = importlib.import_module(package).__path__ if package in sys.modules else None
    around = {module.name for module in pkgutil.iter_modules(there)}
    if there is None:
        last = name.partition(".")[0]
        around |= {entry.name for entry in os.scandir() if entry.is_dir()}
    needed = f", which {class_path} needs" if class_path else ""
    return (
        f"there is no module {name!r}{needed}; expected one that is installed or in the current folder."
        f"{did_you_mean(last, around - {last}, cutoff=0.75)}"  # every installed module is a choice
    )


def _unknown_argument(name: str, class_path: str) -> str:
    try:
        cls = _imported(class_path)
        taken = _arguments(cls)
    except (ImportError, AttributeError, ValueError):
        cls, taken = None, []
    if any(cls in both(base) for base, _, _ in _PLACES):
        return f"got the argument {name!r} without a class; expected class_path next to init_args."
    if cls is not None and inspect.isclass(cls) and issubclass(cls, Optimizer):
        taken = taken[1:]  # without the parameters
    head = name.partition(".")[0]
    name = name if head in taken else head
    expected = f" Expected init_args among {_listed(taken)}." if taken else ""
    return f"{class_path} has no argument {name!r}.{did_you_mean(name, taken)}{expected}"


def _imported(path: str) -> Any:
    """Import the object at a dotted path, or one that this package exports."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name) if module else public.found(name)


def _arguments(cls: Any) -> list[str]:
    """Return the arguments of a class's constructor, and of the base constructors that get its keyword arguments."""
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
    name = re.sub(r"\.(class_path|init_args|dict_kwargs)\b.*", "", name)  # keys inside an object
    word = name.lstrip("-")
    actions = [action.dest for action in parser._actions]
    known = [dest for dest in actions if dest != "subcommand" and dest.rpartition(".")[2] != "help"]
    section, _, last = word.partition(".")
    inside = [key.partition(".")[2] for key in known if key.startswith(f"{section}.")] if last else []
    near = did_you_mean(last, inside).replace("'", f"'{section}.", 1) if inside else did_you_mean(word, known)
    if near and option:
        near = near.replace("'", "'--", 1)
    what = f"option {name!r}" if option else f"key {name!r}"
    tops = dict.fromkeys(key.partition(".")[0] for key in known)
    expected = f" {section} has {_listed(inside)}." if inside else f" Expected one of the sections {_listed(tops)}."
    return f"there is no {what}.{near or expected}"


def _subclasses(base: type) -> set[type]:
    return {cls for direct in base.__subclasses__() for cls in {direct, *_subclasses(direct)}}


def _listed(names: Any, most: int = 20) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _line(text: str) -> str:
    return " ".join(text.split())
