"""Build the arms of a benchmark: the baseline, recipes, their controls, and the baseline at other budgets."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_eff._core._lightning.names import is_a, like, package_of
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._core.technique import Technique
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.pacer import Pacer
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
from lightning_eff.monitor.training_report import TrainingReport

#: The callbacks that a bench removes from every arm, because it paces, logs and saves the runs itself.
LEFT_OUT = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EfficiencyMonitor,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
    TrainingReport,
)


class Built(NamedTuple):
    """The parts of a run, for ``trainer.fit(module, **data)``."""

    trainer: Trainer
    module: LightningModule
    data: dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One arm of the comparison.

    Attributes:
        name: a name that is unique in the bench.
        kind: "baseline", "recipe", "control" (of a recipe) or "ladder" (the baseline at another budget).
        of: the recipe of a control.
        factor: the budget as a factor of the bench's budget.
        description: a line for the report.
        configs: the texts of the configs.
        source: the paths of the configs, or the function that builds the arm.
        rate: the arm's own peak learning rate, instead of the module's.
        warm_up: the arm's own warm-up, in seconds or as a fraction of the budget.
        replaced: for a control, the index of a technique among the recipe's callbacks, and the name of its replacement.
    """

    name: str
    kind: str
    source: tuple[str, ...] | Callable[..., Any]
    of: str | None = None
    factor: float = 1.0
    description: str = ""
    configs: tuple[str, ...] = field(default=(), repr=False)
    replaced: tuple[int, str] | None = None
    rate: float | None = None
    warm_up: str | float | None = None

    def build(self, seed: int) -> Built:
        """Build a new Trainer and module with ``seed``.

        Raises:
            Incomparable: if the function does not return a Trainer and a module.
        """
        seed_everything(seed, workers=True, verbose=False)
        built = _from_function(self.name, self.source) if callable(self.source) else _from_configs(self.source, seed)
        callbacks: list[Any] = built.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self.replaced is not None:
            at, name = self.replaced
            callbacks[at] = stand_ins(callbacks[at])[name]
        return built

    def texts(self) -> list[str]:
        """Return the texts of the configs, or the function's source if it is available."""
        if not callable(self.source):
            return list(self.configs)
        try:
            return [inspect.getsource(self.source)]
        except (OSError, TypeError):
            return []

    def record(self) -> dict[str, Any]:
        """Return the arm's entry in ``results.json``."""
        names = ("name", "kind", "of", "factor", "description")
        own = {name: getattr(self, name) for name in ("rate", "warm_up") if getattr(self, name) is not None}
        return {**{name: getattr(self, name) for name in names}, **own, "configs": list(self.configs)}


def stand_ins(technique: Technique) -> Mapping[str, Any]:
    """Return the callbacks that replace a technique in its control arms, by name."""
    return technique.control.arms(technique)


def ready(built: Built, pacer: Pacer) -> None:
    """Prepare the Trainer for the bench: remove its own callbacks for pacing, logging and saving."""
    trainer = built.trainer
    callbacks = [c for c in trainer.callbacks if not is_a(c, *LEFT_OUT)]  # pyright: ignore[reportAttributeAccessIssue]
    trainer.callbacks = [pacer, *callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    trainer.loggers = [like(trainer, DummyLogger)()]
    trainer.num_sanity_val_steps = 0
    trainer.val_check_interval, trainer.check_val_every_n_epoch = 1.0, 1  # the pacer says when
    trainer.fit_loop.epoch_loop.val_loop.verbose = False


def _from_function(name: str, function: Callable[..., Any]) -> Built:
    built = function()
    expected = (
        "a new Trainer and a new LightningModule, then a LightningDataModule or a dict of fit's arguments if needed"
    )
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not is_a(built[0], Trainer):
        raise Incomparable(f"{name}: its function returned {type(built).__name__}. Return a tuple of {expected}.")
    trainer, module = built[:2]
    if not is_a(getattr(module, "_orig_mod", module), LightningModule):  # torch.compile wraps it
        raise Incomparable(f"{name}: its function returned a {type(module).__name__} as module. Return {expected}.")
    if package_of(trainer) != (package := package_of(getattr(module, "_orig_mod", module))):
        raise Incomparable(
            f"{name}: its function returned a {package_of(trainer)} Trainer and a {package} module, which Lightning cannot"
            f" train together. Make the Trainer with `from {package} import Trainer`."
        )
    if trainer.fit_loop.epoch_loop.total_batch_idx > 0 or any(isinstance(c, Pacer) for c in _callbacks(trainer)):
        raise Incomparable(f"{name}: its function returned a Trainer that has already run. Return {expected}.")
    data = built[2] if len(built) == 3 else {}
    if isinstance(data, Mapping):
        return Built(trainer, module, dict(data))
    return Built(trainer, module, {"datamodule" if is_a(data, LightningDataModule) else "train_dataloaders": data})


def _from_configs(paths: Sequence[str], seed: int) -> Built:
    """Build the parts of the run that ``lightning-eff fit`` would start with these configs."""
    from lightning_eff._cli.config import ConfigCLI

    class Unrun(ConfigCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            pass

    configs = [argument for path in paths for argument in ("--config", path)]
    cli = Unrun(["fit", *configs, f"--seed_everything={seed}", "--trainer.logger=false"], save_config_callback=None)
    data = {} if cli.datamodule is None else {"datamodule": cli.datamodule}
    return Built(cli.trainer, cli.model, data)


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]


def named(text: str) -> tuple[str, tuple[str, ...]]:
    """Split ``"name=a.yaml,b.yaml"`` into the name and the paths. The default name is the last file's stem.

    Raises:
        FileNotFoundError: if a file does not exist.
    """
    name, equals, rest = text.partition("=")
    paths = tuple((rest if equals else text).split(","))
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"{text!r}: there is no file {path!r}. Give the configs of an arm as name=base.yaml,more.yaml; the name is"
                " optional."
            )
    return (name if equals else Path(paths[-1]).stem), paths


def lay_out(
    baseline: tuple[str, Any],
    recipes: Mapping[str, Any],
    *,
    controls: bool,
    ladder: Sequence[float],
    rates: Mapping[str, float] | None = None,
    warm_ups: Mapping[str, str | float] | None = None,
) -> list[Arm]:
    """Return all arms: the baseline, each recipe followed by its controls, then the ladder.

    Args:
        baseline: its name, and the paths of its configs or the function that builds it.
        recipes: the same for each recipe, by name.
        controls: whether to add the controls that each technique of a recipe names.
        ladder: further budgets of the baseline, as factors of the budget.
        rates: the peak learning rate of arms that have their own, by name. A recipe's controls use it too.
        warm_ups: the warm-up of arms that have their own, by name.

    Raises:
        ValueError: if two arms have the same name, or a learning rate or warm-up belongs to no arm.
    """
    own = {"rate": dict(rates or {}), "warm_up": dict(warm_ups or {})}
    for what, values in own.items():
        if strangers := sorted(values.keys() - {baseline[0], *recipes}):
            raise ValueError(
                f"Benchmark({what}s={strangers}): there are no such arms. Use names from {[baseline[0], *recipes]}."
            )

    def settings(name: str) -> dict[str, Any]:
        return {what: values.get(name) for what, values in own.items()}

    first = "the recipes are compared with it"
    arms = [_arm(baseline[0], "baseline", baseline[1], description=first, **settings(baseline[0]))]
    for name, source in recipes.items():
        recipe = _arm(name, "recipe", source, **settings(name))
        with undisturbed():
            callbacks = _callbacks(recipe.build(0).trainer)
        techniques = [(i, c) for i, c in enumerate(callbacks) if isinstance(c, Technique)]
        arms.append(replace(recipe, description=", ".join(type(c).__name__ for _, c in techniques) or "no technique"))
        for at, technique in techniques if controls else ():
            for other in stand_ins(technique):
                arms.append(
                    replace(
                        recipe,
                        name=f"{name}: {other}",
                        kind="control",
                        of=name,
                        replaced=(at, other),
                        description=f"{other} instead of {type(technique).__name__}: {technique.control.text}",
                    )
                )
    for factor in ladder:
        name = f"{baseline[0]} × {factor:g}"
        arms.append(replace(arms[0], name=name, kind="ladder", factor=factor, description="at another budget"))
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Several arms are named {twice}. Give each its own name: name=config.yaml.")
    return arms


def _arm(name: str, kind: str, source: Any, **more: Any) -> Arm:
    if callable(source):
        return Arm(name, kind, source, **more)
    paths = (source,) if isinstance(source, str | os.PathLike) else tuple(source)
    configs = tuple(f"# {short(path)}\n{Path(path).read_text()}" for path in paths)
    return Arm(name, kind, tuple(map(str, paths)), configs=configs, **more)


def short(path: str | os.PathLike[str]) -> str:
    """Return a path relative to the current folder if it is below it, and unchanged otherwise."""
    short = os.path.relpath(path)
    return os.fspath(path) if short.startswith(os.pardir) else short
