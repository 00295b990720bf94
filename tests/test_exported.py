"""What every exported class has: tests of its own, and a YAML that the command line takes, with the settings of its case."""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

import lightning_eff
from lightning_eff._cli.config import ConfigCLI
from lightning_eff._cli.errors import ConfigError
from lightning_eff._core._arguments.declared import arguments_of
from tests import selection
from tests.cases import CASES
from tests.plugins import PLUGINS

CLASSES = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
CLASSES = {name: cls for name, cls in CLASSES.items() if inspect.isclass(cls)}
IN_YAML = {name: cls for name, cls in CLASSES.items() if issubclass(cls, Callback | Precision | Strategy | Optimizer)}


#: techniques of which no argument stands out, so that all are given by name
BY_NAME = {
    "ActivationOffload",
    "AugMix",
    "CoMixup",
    "CompoundGrowth",
    "DataDrivenInit",
    "DropIn",
    "EfficiencyMonitor",
    "Fastformer",
    "Fixup",
    "FusedLinearCrossEntropy",
    "GatedPositionalAttention",
    "MetaInit",
    "OptimizerOffload",
    "ReZero",
    "StochasticRoundingBF16",
    "TFixup",
    "ZerO",
}


def test_the_main_argument_can_be_given_by_position() -> None:
    by_name = set[str]()
    for name, cls in CLASSES.items():
        first = next(iter(inspect.signature(cls).parameters.values()), None)
        if first is not None and first.kind is first.KEYWORD_ONLY:
            by_name.add(name)
    assert by_name == BY_NAME
    for name, value, argument in (
        ("LabelSmoothing", 0.2, "epsilon"),
        ("SequenceLengthWarmup", 32, "start"),
        ("LoRA", 4, "rank"),
        ("PatchDropout", 0.25, "ratio"),
    ):
        assert repr(CLASSES[name](value)) == f"{name}({argument}={value})"


#: arguments that other code checks: by torch, by Lightning, or by a parser whose messages say more
UNDECLARED = {
    *((name, "params") for name in ("ACClip", "Adan", "LAMB", "LARS", "Lion", "Muon", "SOAP", "Shampoo")),
    *((name, argument) for name in ("APOLLO", "GaLore") for argument in ("params", "split")),
    *((name, "split") for name in ("Muon", "SOAP", "Shampoo")),
    *((name, "base") for name in ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision")),
    *(("CompressedDDPStrategy", name) for name in ("accelerator", "parallel_devices", "cluster_environment")),
    *(("CompressedDDPStrategy", name) for name in ("checkpoint_io", "precision_plugin")),
    *(("Tuner", name) for name in ("baseline", "target", "budget", "search", "memory", "space", "include", "exclude")),
    *(("Tuner", name) for name in ("out", "seed")),
    ("ACTPrecision", "inner"),
    ("Benchmark", "budget"),
    ("HybridParallelStrategy", "schedule"),
    ("Muon", "adam"),
    ("Rematerialization", "memory_budget"),
    ("ReplaceOptimizer", "optimizer"),
}


def _arguments(cls: type) -> Iterator[inspect.Parameter]:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    yield from (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_its_arguments_are_declared(name: str) -> None:
    declared = {argument for argument, how in arguments_of(CLASSES[name]).items() if how.kind is not None}
    assert {(name, p.name) for p in _arguments(CLASSES[name]) if p.name not in declared} <= UNDECLARED


class Strange:
    """A value that no argument accepts."""


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_its_arguments_refuse_other_values(name: str) -> None:
    """No argument takes a foreign object, NaN, a bool for a number, or a number written as text."""
    cls = CLASSES[name]
    kinds = {argument: how.kind for argument, how in arguments_of(cls).items() if how.kind is not None}
    for argument, kind in kinds.items():
        wrong: list[Any] = [Strange(), math.nan, np.float32("nan"), [math.nan], {"a": math.nan}]
        if "number" in kind.expected or "integer" in kind.expected:
            texts = not any(word in kind.expected for word in ("path", "a string", "a name", "True or"))
            wrong += [True, np.bool_(True)] * ("True or" not in kind.expected) + ["0.5", "1"] * texts
        for value in wrong:
            with pytest.raises((ValueError, TypeError)):
                print(name, argument, kind(value), "of", repr(value))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_its_defaults_are_accepted_as_they_are(name: str) -> None:
    """A default equals what its kind makes of it, and numpy's numbers become Python's."""
    kinds = arguments_of(CLASSES[name])
    for p in _arguments(CLASSES[name]):
        how, default = kinds.get(p.name), p.default
        if how is None or how.kind is None or default is p.empty or (default is None and how.optional):
            continue
        found = how.kind(default)
        assert [*found] == [*default] if isinstance(found, tuple | list) else found == default
        if isinstance(default, int | float) and not isinstance(default, bool):
            found = how.kind(np.float64(default) if isinstance(default, float) else np.int64(default))
            assert found == default and type(found) is type(default)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_has_tests_of_its_own(name: str) -> None:
    """A file called after its module, or files of the same room that speak of it."""
    assert selection.own_files(name), f"{name} of {selection.home(name)}: expected a file of the same room to test it"


def test_what_has_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, home in {"Unheard": "optim.optimizers.unheard", "Stray": "strategies.stray", "Odd": "budget.odd"}.items():
        cls = type(name, (), {"__module__": f"lightning_eff.{home}"})
        monkeypatch.setattr(lightning_eff, name, cls, raising=False)
        assert selection.own_files(name) == []


class Unrun(ConfigCLI):
    """Reads a config and makes what it names, and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class Unmade(Unrun):
    """Reads a config."""

    def instantiate_classes(self) -> None:
        pass


@contextmanager
def constructed(cls: type) -> Iterator[list[dict[str, Any]]]:
    """The arguments, by name, with which ``cls`` is constructed in the block."""
    plain, found = cls.__init__, []

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(inspect.signature(plain).bind(self, *args, **kwargs).arguments)
        plain(self, *args, **kwargs)

    cls.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield found
    finally:
        cls.__init__ = plain  # pyright: ignore[reportAttributeAccessIssue]


def settings_of(cls: type, build: Callable[[], Any]) -> dict[str, Any]:
    """What ``build`` gives the constructor of ``cls``, as YAML can say it."""
    with constructed(cls) as found:
        build()
    given = {**found[0], **found[0].get("kwargs", {})}
    return {name: as_yaml(value) for name, value in given.items() if name not in ("self", "kwargs")}


def as_yaml(value: Any) -> Any:
    """The value in YAML's own kinds: a class with arguments as ``class_path`` and ``init_args``, a function by its path."""
    if isinstance(value, functools.partial):
        arguments = {name: as_yaml(item) for name, item in value.keywords.items()}
        return {"class_path": f"{value.func.__module__}.{value.func.__qualname__}", "init_args": arguments}
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict):
        return {key: as_yaml(item) for key, item in value.items()}
    return [as_yaml(item) for item in value] if isinstance(value, list | tuple) else value


def recipe(name: str) -> dict[str, Any]:
    """The trainer's part of a config that names one exported class."""
    cls = CLASSES[name]
    if issubclass(cls, Optimizer):
        return {
            "callbacks": [
                {"class_path": "ReplaceOptimizer", "init_args": {"optimizer": {"class_path": f"lightning_eff.{name}"}}}
            ]
        }
    build = CASES[name].active if name in CASES else cls
    if name in PLUGINS:
        build = functools.partial(PLUGINS[name].build, PLUGINS[name].precisions[0])
    given = {} if issubclass(cls, Strategy) else settings_of(cls, build)
    alike = hasattr(callbacks, name)  # the short name is refused as ambiguous where Lightning has a class of the same
    one = {"class_path": f"lightning_eff.{name}" if alike else name, **({"init_args": given} if given else {})}
    if issubclass(cls, Strategy):
        return {"strategy": one}
    return {"plugins" if issubclass(cls, Precision) else "callbacks": [one]}


def read(cli: type[Unrun], trainer: dict[str, Any], folder: Path) -> Unrun:
    """The command line with a config whose trainer has these entries."""
    plain = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    named = {"model": {"class_path": "tests.models.TinyClassifier"}, "data": {"class_path": "tests.cli_data.Classes"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"trainer": plain | trainer, **named}))
    return cli(["fit", "--config", str(folder / "recipe.yaml")], save_config_callback=None)


TOGETHER = 12  # callbacks that one config names: to make a parser takes longer than to read a few of them


@pytest.fixture(scope="module")
def callback_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Callback]:
    """The callback of this name, as a config makes it that names some more, or it alone if the others cannot be read."""
    names = sorted(name for name, cls in IN_YAML.items() if issubclass(cls, Callback))
    made: dict[str, Callback] = {}

    def found(*some: str) -> dict[str, Callback]:
        folder = tmp_path_factory.mktemp("together")
        cli = read(Unrun, {"callbacks": [one for name in some for one in recipe(name)["callbacks"]]}, folder)
        return {type(one).__name__: one for one in cli.trainer.callbacks}  # pyright: ignore[reportAttributeAccessIssue]

    def callback(name: str) -> Callback:
        if name not in made:
            first = names.index(name) // TOGETHER * TOGETHER
            some = (name,) if selection.chosen(request.config) else names[first : first + TOGETHER]
            try:
                made.update(found(*some))
            except Exception:
                made.update(found(name))
        return made[name]

    return callback


@pytest.mark.parametrize("name", sorted(IN_YAML))
def test_a_yaml_names_it(name: str, tmp_path: Path, callback_of: Callable[[str], Callback]) -> None:
    """It is made from the YAML as its case makes it; strategies, which look at the machine as they are made, are read."""
    cls, wanted = CLASSES[name], recipe(name)
    if issubclass(cls, Strategy):
        found = read(Unmade, wanted, tmp_path).config["fit"]["trainer"]["strategy"]
        assert found["class_path"].rpartition(".")[2] == name
        return
    if issubclass(cls, Optimizer):
        cli = read(Unrun, wanted, tmp_path)
        assert f".{name}" in str(cli.config["fit"]["trainer"]["callbacks"])
        made = [type(one).__name__ for one in cli.trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
        assert "ReplaceOptimizer" in made
        return
    one: Any = (
        callback_of(name) if issubclass(cls, Callback) else read(Unrun, wanted, tmp_path).trainer.precision_plugin
    )
    assert type(one).__name__ == name
    ((entry,),) = wanted.values()
    for key, value in entry.get("init_args", {}).items():
        kept = getattr(one, key, value)
        if isinstance(value, int | float | str) and isinstance(kept, int | float | str):
            assert kept == value, f"{key}: the YAML says {value}"


@pytest.mark.parametrize(
    "trainer",
    [
        {"callbacks": [{"class_path": "ProgressiveStacking", "init_args": {"staged": []}}]},
        {"callbacks": [{"class_path": "Unheard"}]},
        {"strategy": {"class_path": "HybridParallelStrategy", "init_args": {"tensor": "two"}}},
    ],
)
def test_a_yaml_that_names_nothing_is_refused(trainer: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read(Unrun, trainer, tmp_path)


def test_configs_take_the_other_names_of_arguments(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    callbacks_ = [{"class_path": "LabelSmoothing", "init_args": {"label_smoothing": 0.2}}]
    callbacks_.append({"class_path": "lightning_eff.LoRA", "init_args": {"r": 4, "lora_alpha": 8.0}})
    model = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    config.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks_}, "model": model}))
    made = [repr(c) for c in Unrun(["fit", "--config", str(config)]).trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    assert "LabelSmoothing(epsilon=0.2)" in made
    assert any(one.startswith("LoRA(rank=4, alpha=8.0") for one in made)
