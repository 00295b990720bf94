"""The arms of a benchmark: the baseline, its recipes, their controls, and the baseline at other budgets."""

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from lightning_eff._core import rng
from lightning_eff._core._lightning.names import NAMES, is_a, like, package_of
from lightning_eff._core.technique import Technique
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.pacer import Pacer
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
from lightning_eff.monitor.training_report import TrainingReport

#: What a bench leaves out of every arm: it paces, reports and saves by itself, and every arm uses up its budget.
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
    """One run, ready for ``trainer.fit(module, **data)``."""

    trainer: Trainer
    module: LightningModule
    data: dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One arm of the comparison.

    Attributes:
        name: unique in the bench.
        kind: "baseline", "recipe", "control" (of a recipe) or "ladder" (the baseline at another budget).
        of: the recipe that a control belongs to.
        factor: of the budget.
        description: one line for people.
        configs: the texts of its configs, for the record.
        source: the paths of its configs, or the function that builds it.
        rate: its own learning rate at the peak, in the module's place.
        warm_up: its own warm-up, in seconds or as a share of the budget.
        replaced: for a control, the place of a technique among the recipe's callbacks, and the name of its stand-in.
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
        """A fresh trainer and module under ``seed``.

        Raises:
            Incomparable: if the function returns something else than a trainer and a module.
        """
        seed_everything(seed, workers=True, verbose=False)
        built = _from_function(self.name, self.source) if callable(self.source) else _from_configs(self.source, seed)
        callbacks: list[Any] = built.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self.replaced is not None:
            at, name = self.replaced
            callbacks[at] = stand_ins(callbacks[at])[name]
        return built

    def texts(self) -> list[str]:
        """Its configs' texts, or its function's source where there is one."""
        if not callable(self.source):
            return list(self.configs)
        try:
            return [inspect.getsource(self.source)]
        except (OSError, TypeError):
            return []

    def record(self) -> dict[str, Any]:
        """The arm in ``results.json``."""
        names = ("name", "kind", "of", "factor", "description")
        own = {name: getattr(self, name) for name in ("rate", "warm_up") if getattr(self, name) is not None}
        return {**{name: getattr(self, name) for name in names}, **own, "configs": list(self.configs)}


def stand_ins(technique: Technique) -> Mapping[str, Any]:
    """What takes a technique's place in its control arms, by name."""
    return technique.control.arms(technique)


def ready(built: Built, pacer: Pacer) -> None:
    """Hand the trainer over to the bench: its own callbacks for pacing, logging and saving are left out."""
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
        "a new Trainer and a new LightningModule, and a LightningDataModule or fit's arguments in a dict if needed"
    )
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not is_a(built[0], Trainer):
        raise Incomparable(f"{name}: its function returned {type(built).__name__}; expected a tuple of {expected}.")
    trainer, module = built[:2]
    if not is_a(getattr(module, "_orig_mod", module), LightningModule):  # torch.compile wraps it
        raise Incomparable(f"{name}: its function returned a {type(module).__name__} as module; expected {expected}.")
    if package_of(trainer) != (package := package_of(getattr(module, "_orig_mod", module))):
        raise Incomparable(
            f"{name}: its function returned a {package_of(trainer)} Trainer and a {package} module, which Lightning cannot"
            f" train together. Make the Trainer with `from {package} import Trainer`."
        )
    if trainer.fit_loop.epoch_loop.total_batch_idx > 0 or any(isinstance(c, Pacer) for c in _callbacks(trainer)):
        raise Incomparable(f"{name}: its function returned a Trainer that has run before; expected {expected}.")
    data = built[2] if len(built) == 3 else {}
    if isinstance(data, Mapping):
        return Built(trainer, module, dict(data))
    return Built(trainer, module, {"datamodule" if is_a(data, LightningDataModule) else "train_dataloaders": data})


def _from_configs(paths: Sequence[str], seed: int) -> Built:
    """What ``lightning-eff fit`` would run with these configs."""
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
    """``"a.yaml,b.yaml"`` or ``"name=a.yaml,b.yaml"`` as a name (the last file's stem) and the paths.

    Raises:
        FileNotFoundError: naming the first of them that is not there.
    """
    name, equals, rest = text.partition("=")
    paths = tuple((rest if equals else text).split(","))
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"Got {text!r}, and there is no file {path!r}; expected configs of LightningCLI, several for one arm"
                " joined by commas, with a name if wanted: name=base.yaml,more.yaml."
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
    """Every arm, the baseline first, each recipe followed by its controls, the ladder last.

    Args:
        baseline: its name, and its configs' paths or the function that builds it.
        recipes: the same, by name.
        controls: add the arms that each technique of a recipe names as its control.
        ladder: factors of the budget at which the baseline runs too.
        rates: an arm's own learning rate at the peak, by name; a recipe's controls have it too.
        warm_ups: an arm's own warm-up, likewise.

    Raises:
        ValueError: if two arms have one name, or a rate or a warm-up is of none.
    """
    own = {"rate": dict(rates or {}), "warm_up": dict(warm_ups or {})}
    for what, values in own.items():
        if strangers := sorted(values.keys() - {baseline[0], *recipes}):
            raise ValueError(f"Got a {what} for {strangers}; expected names of arms: {[baseline[0], *recipes]}.")

    def settings(name: str) -> dict[str, Any]:
        return {what: values.get(name) for what, values in own.items()}

    why = "what the recipes are held against"
    arms = [_arm(baseline[0], "baseline", baseline[1], description=why, **settings(baseline[0]))]
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
                        description=f"{other} in place of {type(technique).__name__}: {technique.control.text}",
                    )
                )
    for factor in ladder:
        name = f"{baseline[0]} × {factor:g}"
        arms.append(replace(arms[0], name=name, kind="ladder", factor=factor, description="at another budget"))
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Got several arms named {twice}; expected each to have its own name: name=config.yaml.")
    return arms


def _arm(name: str, kind: str, source: Any, **more: Any) -> Arm:
    if callable(source):
        return Arm(name, kind, source, **more)
    paths = (source,) if isinstance(source, str | os.PathLike) else tuple(source)
    configs = tuple(f"# {short(path)}\n{Path(path).read_text()}" for path in paths)
    return Arm(name, kind, tuple(map(str, paths)), configs=configs, **more)


def short(path: str | os.PathLike[str]) -> str:
    """A path below the current folder as it is from there, another as it was given."""
    short = os.path.relpath(path)
    return os.fspath(path) if short.startswith(os.pardir) else short


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without Lightning's chatter; random state and the seed in the environment are afterwards as they were."""
    import warnings

    loggers = [logging.getLogger(name) for names in NAMES.items() for name in names]
    levels = [logger.level for logger in loggers]
    seeds = {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), rng.fork():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in seeds.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
