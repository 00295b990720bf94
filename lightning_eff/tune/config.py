"""Recipes as LightningCLI configs: the baseline's own, with some of its settings and the techniques in a layer above it."""

import hashlib
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from typing_extensions import override

from lightning_eff._cli.errors import UsageError, check_configs
from lightning_eff._core.search_space import Choice, frozen
from lightning_eff.bench.arms import Arm, undisturbed
from lightning_eff.tune.own import SETTINGS
from lightning_eff.tune.space import Space, parse_range

SCHEDULE = "lightning_eff.LearningRateSchedule"  # in the place of a schedule of the module's that does not decay
WARM_UP = 0.05  # of the budget, of that schedule, where nothing else was chosen; as the bench has it


@dataclass(frozen=True)
class Choices:
    """What one trial has chosen.

    Attributes:
        own: values of the baseline's own settings, by name; what is not there stays as it is.
        techniques: settings of the techniques that are on, by name.
    """

    own: Mapping[str, Any] = field(default_factory=dict)
    techniques: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "own": dict(sorted(self.own.items())),
            "techniques": {name: dict(sorted(values.items())) for name, values in sorted(self.techniques.items())},
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Choices":
        """From JSON, which has lists where there were tuples."""

        def made(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: frozen(value) for name, value in values.items()}

        return cls(made(record["own"]), {name: made(values) for name, values in record["techniques"].items()})

    @property
    def key(self) -> str:
        """The same for the same choices, and for no others."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()[:12]

    def told(self) -> str:
        """In words."""
        named = ", ".join(
            name + (f"({', '.join(f'{k}={_short(v)}' for k, v in values.items())})" if values else "")
            for name, values in self.techniques.items()
        )
        own = ", ".join(f"{name} {_short(value)}" for name, value in self.own.items())
        return " with ".join(part for part in (named, own) if part) or "as it is"

    def without(self, name: str) -> "Choices":
        """The same, but for a technique."""
        return Choices(self.own, {key: value for key, value in self.techniques.items() if key != name})


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid upon ``base``, mapping by mapping, as LightningCLI does; another class has its own arguments."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, str) and isinstance(value, Mapping) and "init_args" in value:
            old = {"class_path": old}
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            theirs, ours = value.get("class_path"), old.get("class_path")
            old = old if theirs in (None, ours) else None
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def read(paths: Sequence[str]) -> dict[str, Any]:
    """Configs, merged from left to right."""
    whole: dict[str, Any] = {}
    for path in paths:
        whole = merged(whole, yaml.safe_load(Path(path).read_text()) or {})
    return whole


def parsed(paths: Sequence[str]) -> dict[str, Any]:
    """Configs as LightningCLI reads them, with the defaults of every class.

    Raises:
        UsageError: for what it cannot read.
    """
    from lightning_eff._cli.config import ConfigCLI

    class Parsed(ConfigCLI):
        @override
        def instantiate_classes(self) -> None:
            pass

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    arguments = [argument for path in paths for argument in ("--config", path)]
    check_configs(arguments)
    with undisturbed():
        cli = Parsed(["fit", *arguments, "--trainer.logger=false"], save_config_callback=None)
    return cli.config["fit"].as_dict()


def check_own(paths: Sequence[str], told: Mapping[str, Any] | None) -> None:
    """Whether configs can have what a space file says of their own settings.

    Args:
        paths: of the configs.
        told: the section ``own`` of the file.

    Raises:
        UsageError: for a key that is not there, or a value that it cannot have.
    """
    for name, value in (told or {}).items():
        if not isinstance(value, Mapping) or "key" not in value:
            continue
        rest = {k: v for k, v in value.items() if k not in ("key", "in_steps")}
        what = parse_range(f"own.{name}", rest) if rest else None
        tried = (
            (1,) if value.get("in_steps") or what is None else what.values if isinstance(what, Choice) else (what.low,)
        )
        for one in tried:
            config: dict[str, Any] = {}
            _put(config, value["key"], one)
            with TemporaryDirectory() as folder:
                file = Path(folder) / f"{name}.yaml"
                file.write_text(dumped(config))
                try:
                    parsed([*paths, str(file)])
                except UsageError as error:
                    there = "has no argument" not in str(error)
                    steps = there and isinstance(one, float)
                    hint = " A key that is in optimizer steps takes in_steps: true." if steps else ""
                    raise UsageError(
                        f"own.{name}: the config takes no {value['key']} of {one!r}: {error}{hint}"
                    ) from None


def digests(config: Mapping[str, Any], include: Sequence[str] = ()) -> dict[str, str]:
    """The source files of a config's own classes, and digests of what they hold.

    Args:
        config: of :func:`parsed`: the classes of its model, its data and its trainer's callbacks.
        include: class paths of callbacks beside them.
    """
    callbacks = (config.get("trainer") or {}).get("callbacks") or ()
    parts = [config.get("model"), config.get("data"), *(callbacks if isinstance(callbacks, list) else [callbacks])]
    named = [part.get("class_path") for part in parts if isinstance(part, Mapping)] + [*include]
    found: dict[str, str] = {}
    for name in named:
        home, _, cls = str(name).rpartition(".")
        try:
            path = inspect.getsourcefile(getattr(importlib.import_module(home), cls))
        except (ImportError, AttributeError, TypeError, ValueError):  # it has no file, or no class path
            continue
        if path is not None and Path(path).is_file():
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


class Recipes:
    """Writes what was chosen as configs above the baseline's.

    Args:
        paths: of the baseline's configs.
        space: what may be chosen.
        scheduled: the module decays its rate by itself; else a linear decay stands in its place, in every arm.
    """

    def __init__(self, paths: Sequence[str], space: Space, *, scheduled: bool) -> None:
        self.paths = tuple(paths)
        self.space = space
        self.scheduled = scheduled
        self._raw = read(paths)

    def overlay(self, choices: Choices, steps: int) -> dict[str, Any]:
        """What stands above the baseline's configs.

        Args:
            choices: what was chosen.
            steps: optimizer steps of the run, for settings that a config has in steps.
        """
        config: dict[str, Any] = {}
        outside: dict[str, Any] = {}
        warm_up = WARM_UP
        for one in self.space.own:
            if one.name not in choices.own:
                continue
            value = choices.own[one.name]
            if one.key is not None:
                _put(config, one.key, max(round(value * steps), int(value > 0)) if one.in_steps else value)
            elif one.name == "warm_up":
                warm_up = value
            else:
                outside[one.name] = value
        on = [(self.space.techniques[name], values) for name, values in choices.techniques.items()]
        callbacks: list[Any] = []
        if outside:
            callbacks.append({"class_path": SETTINGS, "init_args": outside})
        if not self.scheduled and not any(one.sets_rates(values, self.space.profile) for one, values in on):
            callbacks.append({"class_path": SCHEDULE, "init_args": {"shape": "linear", "warmup": warm_up}})
        places: dict[str, list[Any]] = {"callbacks": callbacks, "plugins": [], "strategy": []}
        for one, values in on:
            places[one.place].append(one.config(values, self.space.profile))
        trainer = self._raw.get("trainer") or {}
        for place, items in places.items():
            if not items:
                continue
            here = trainer.get(place) or []
            value = items[0] if place == "strategy" else [*(here if isinstance(here, list) else [here]), *items]
            config.setdefault("trainer", {})[place] = value
        return config

    def counts_steps(self, choices: Choices) -> bool:
        """Whether a config of these choices hangs on how many steps the run has."""
        return any(one.in_steps and one.name in choices.own for one in self.space.own)

    def whole(self, choices: Choices, steps: int) -> dict[str, Any]:
        """The whole config, the baseline's included."""
        return merged(self._raw, self.overlay(choices, steps))

    def arm(self, name: str, choices: Choices, steps: int, folder: Path, kind: str = "recipe") -> Arm:
        """An arm of the bench; its config's own layer is written into ``folder``."""
        config = self.overlay(choices, steps)
        paths = list(self.paths)
        if config:
            file = folder / f"{choices.key}-{steps}.yaml"
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(f"# {choices.told()}\n{dumped(config)}")
            paths.append(str(file))
        return Arm(name, kind, tuple(paths), description=choices.told())


def dumped(config: Mapping[str, Any]) -> str:
    """As YAML.

    Raises:
        ValueError: if something in it is no number, text, list or mapping of these.
    """
    try:
        return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=120)
    except yaml.representer.RepresenterError as error:
        *_, value = error.args
        raise ValueError(
            f"a config cannot say {value!r}, of {type(value).__name__}; expected settings of numbers, text, lists and mappings."
        ) from error


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value
