"""Recipes as LightningCLI configs: a layer with settings and techniques on top of the baseline's configs."""

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
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._core.search_space import Choice, frozen
from lightning_eff.bench.arms import Arm
from lightning_eff.tune.own import SETTINGS
from lightning_eff.tune.space import Space, parse_range

SCHEDULE = "lightning_eff.LearningRateSchedule"  # replaces a schedule of the module that does not decay
WARM_UP = 0.05  # default warm-up of that schedule as a fraction of the budget, as in the bench


@dataclass(frozen=True)
class Choices:
    """The choices of one trial.

    Attributes:
        own: values of the baseline's own settings, by name. Other settings keep the value in the config.
        techniques: the settings of the chosen techniques, by name.
    """

    own: Mapping[str, Any] = field(default_factory=dict)
    techniques: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the choices as JSON."""
        return {
            "own": dict(sorted(self.own.items())),
            "techniques": {name: dict(sorted(values.items())) for name, values in sorted(self.techniques.items())},
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Choices":
        """Read choices from JSON, and turn lists back into tuples."""

        def made(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: frozen(value) for name, value in values.items()}

        return cls(made(record["own"]), {name: made(values) for name, values in record["techniques"].items()})

    @property
    def key(self) -> str:
        """A short hash of the choices."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()[:12]

    def describe(self) -> str:
        """Return the choices in words."""
        named = ", ".join(
            name + (f"({', '.join(f'{k}={_short(v)}' for k, v in values.items())})" if values else "")
            for name, values in self.techniques.items()
        )
        own = ", ".join(f"{name} {_short(value)}" for name, value in self.own.items())
        return " with ".join(part for part in (named, own) if part) or "unchanged"

    def without(self, name: str) -> "Choices":
        """Return the choices without a technique."""
        return Choices(self.own, {key: value for key, value in self.techniques.items() if key != name})


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``over``, mapping by mapping as in LightningCLI. A new class drops the old arguments."""
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
    """Return configs merged from left to right."""
    whole: dict[str, Any] = {}
    for path in paths:
        whole = merged(whole, yaml.safe_load(Path(path).read_text()) or {})
    return whole


def parsed(paths: Sequence[str]) -> dict[str, Any]:
    """Return configs as LightningCLI reads them, with the defaults of every class.

    Raises:
        UsageError: for a config that it cannot read.
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


def check_own(paths: Sequence[str], settings: Mapping[str, Any] | None) -> None:
    """Check that configs accept the settings in a space file.

    Args:
        paths: the paths of the configs.
        settings: the section ``own`` of the file.

    Raises:
        UsageError: for an unknown key, or a value that it does not accept.
    """
    for name, value in (settings or {}).items():
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
                    hint = " Set in_steps: true for a key in optimizer steps." if steps else ""
                    raise UsageError(
                        f"own.{name}: the config does not accept {value['key']}={one!r}: {error}{hint}"
                    ) from None


def digests(config: Mapping[str, Any], include: Sequence[str] = ()) -> dict[str, str]:
    """Return digests of the source files of a config's classes, by path.

    Args:
        config: the result of :func:`parsed`. The classes are those of its model, its data and its callbacks.
        include: class paths of further callbacks.
    """
    callbacks = (config.get("trainer") or {}).get("callbacks") or ()
    parts = [config.get("model"), config.get("data"), *(callbacks if isinstance(callbacks, list) else [callbacks])]
    named = [part.get("class_path") for part in parts if isinstance(part, Mapping)] + [*include]
    found: dict[str, str] = {}
    for name in named:
        home, _, cls = str(name).rpartition(".")
        try:
            path = inspect.getsourcefile(getattr(importlib.import_module(home), cls))
        except (ImportError, AttributeError, TypeError, ValueError):  # no file or no class path
            continue
        if path is not None and Path(path).is_file():
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


class Recipes:
    """Writes choices as configs on top of the baseline's.

    Args:
        paths: the paths of the baseline's configs.
        space: the possible choices.
        scheduled: whether the module decays its own learning rate. If not, a linear decay replaces its schedule in every arm.
    """

    def __init__(self, paths: Sequence[str], space: Space, *, scheduled: bool) -> None:
        self.paths = tuple(paths)
        self.space = space
        self.scheduled = scheduled
        self._raw = read(paths)

    def overlay(self, choices: Choices, steps: int) -> dict[str, Any]:
        """Return the layer on top of the baseline's configs.

        Args:
            choices: the choices.
            steps: the optimizer steps of the run, for settings that the config has in steps.
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
        """Whether the config of these choices depends on the number of steps."""
        return any(one.in_steps and one.name in choices.own for one in self.space.own)

    def whole(self, choices: Choices, steps: int) -> dict[str, Any]:
        """Return the whole config, including the baseline's."""
        return merged(self._raw, self.overlay(choices, steps))

    def arm(self, name: str, choices: Choices, steps: int, folder: Path, kind: str = "recipe") -> Arm:
        """Return an arm of the bench. The top layer of its config is written into ``folder``."""
        config = self.overlay(choices, steps)
        paths = list(self.paths)
        if config:
            file = folder / f"{choices.key}-{steps}.yaml"
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(f"# {choices.describe()}\n{dumped(config)}")
            paths.append(str(file))
        return Arm(name, kind, tuple(paths), description=choices.describe())


def dumped(config: Mapping[str, Any]) -> str:
    """Return a config as YAML.

    Raises:
        ValueError: for a value other than a number, a text, a list or a mapping.
    """
    try:
        return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=120)
    except yaml.representer.RepresenterError as error:
        *_, value = error.args
        raise ValueError(
            f"YAML cannot hold {value!r} of type {type(value).__name__}. Use numbers, texts, lists and mappings."
        ) from error


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value
