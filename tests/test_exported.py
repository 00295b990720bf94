"""What every exported class has: tests of its own, and a YAML that the command line takes, with the settings of its case."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

import lightning_eff
from lightning_eff._cli.config import ConfigCLI
from lightning_eff._cli.errors import ConfigError
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


@pytest.mark.parametrize("name", sorted(IN_YAML))
def test_a_yaml_names_it(name: str, tmp_path: Path) -> None:
    """It is made from the YAML as its case makes it; strategies, which look at the machine as they are made, are read."""
    if issubclass(CLASSES[name], Strategy):
        found = read(Unmade, recipe(name), tmp_path).config["fit"]["trainer"]["strategy"]
        assert found["class_path"].rpartition(".")[2] == name
        return
    wanted = recipe(name)
    cli = read(Unrun, wanted, tmp_path)
    made = [*cli.trainer.callbacks, cli.trainer.precision_plugin]  # pyright: ignore[reportAttributeAccessIssue]
    by_name = {type(one).__name__: one for one in made}
    if issubclass(CLASSES[name], Optimizer):
        assert f".{name}" in str(cli.config["fit"]["trainer"]["callbacks"]) and "ReplaceOptimizer" in by_name
        return
    ((one,),) = wanted.values()
    for key, value in one.get("init_args", {}).items():
        kept = getattr(by_name[name], key, value)
        if isinstance(value, int | float | str) and isinstance(kept, int | float | str):
            assert kept == value, f"{key}: the YAML says {value}"
    assert name in by_name


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
