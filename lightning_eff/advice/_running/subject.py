"""The run that is advised: a module, its data and its Trainer's settings, of which every trial trains fresh copies."""

import copy
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_eff._cli.errors import UsageError
from lightning_eff._core._lightning.names import is_a, is_overridden, like
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._exports import public
from lightning_eff.bench.arms import LEFT_OUT, Arm, Built
from lightning_eff.bench.pace import Horizon

SEED = 0
#: Settings of a Trainer that a trial's Trainer takes over under the same name.
_SAME = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
    "log_every_n_steps",
)


@dataclass(frozen=True)
class Change:
    """A change of the run's configuration.

    Attributes:
        callbacks: entries of ``trainer.callbacks``, as a config has them.
        plugins: entries of ``trainer.plugins``.
        trainer: arguments of the Trainer.
    """

    callbacks: tuple[Mapping[str, Any], ...] = ()
    plugins: tuple[Mapping[str, Any], ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def plus(self, other: "Change") -> "Change":
        """Both changes."""
        return Change(
            (*self.callbacks, *other.callbacks), (*self.plugins, *other.plugins), {**self.trainer, **other.trainer}
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes that it adds."""
        return tuple(str(entry["class_path"]).rpartition(".")[2] for entry in (*self.callbacks, *self.plugins))

    def record(self) -> dict[str, Any]:
        """As a config has it under ``trainer``."""
        lists = {"callbacks": list(self.callbacks), "plugins": list(self.plugins)}
        return {**self.trainer, **{name: entries for name, entries in lists.items() if entries}}


def entry(cls: Any, **arguments: Any) -> dict[str, Any]:
    """A class with arguments as a config has it. Classes of the package's public list have its short path."""
    name = cls.__name__
    path = f"lightning_eff.{name}" if name in public.HOMES else f"{cls.__module__}.{name}"
    return {"class_path": path, **({"init_args": arguments} if arguments else {})}


def made(what: Mapping[str, Any]) -> Any:
    """The object that an entry of a config describes."""
    home, _, name = str(what["class_path"]).rpartition(".")
    cls = public.found(name) if home in ("", "lightning_eff") else getattr(importlib.import_module(home), name)
    return cls(**what.get("init_args", {}))


class Subject:
    """A run of which trials train fresh copies.

    Args:
        module: the LightningModule, which is never trained itself, or a function that returns a new one.
        data: a LightningDataModule, fit's arguments for data, one loader, or None where the module has its own.
        trainer: the Trainer whose settings count; None for Lightning's defaults.
        configs: the paths of the configs that it was built from.
        folder: where callbacks of the run may write.

    Raises:
        UsageError: for a module, a Trainer or callbacks that cannot be used, with the way out.
    """

    def __init__(
        self, module: Any, data: Any, trainer: Trainer | None, *, folder: str, configs: Sequence[str] = ()
    ) -> None:
        self._make, self.configs, self.notes = _maker(module), tuple(configs), list[str]()
        self.folder = folder
        self._seeds_workers = bool(configs) or os.environ.get("PL_SEED_WORKERS") == "1"  # LightningCLI seeds them
        self._data = _prepared(data)
        self.validation: dict[str, Any] = {"limit_val_batches": 1.0}  # how the Trainer validates, which trials do not
        self.planned: dict[str, Any] = {}  # how often it draws its bar and logs, and whether DDP searches its graph
        first = self._make()
        self.name = type(getattr(first, "_orig_mod", first)).__name__
        self._trainer: Any = like(first, Trainer)
        self.settings, self._callbacks = self._taken(trainer)
        self.steps = _planned(trainer)

    def _taken(self, trainer: Trainer | None) -> tuple[dict[str, Any], list[Any]]:
        """A Trainer's settings, and its callbacks without those that only report, save or stop."""
        if trainer is None:
            return {}, []
        settings = {name: getattr(trainer, name) for name in _SAME if getattr(trainer, name, None) is not None}
        device = trainer.strategy.root_device
        settings |= {"accelerator": device.type, "devices": 1 if device.index is None else [device.index]}
        settings["detect_anomaly"] = getattr(trainer, "_detect_anomaly", False)
        plugin: Any = trainer.precision_plugin
        if type(plugin).__module__.startswith("lightning_eff.") or getattr(type(plugin), "_adapted", None):
            settings["plugins"] = [plugin]
        else:
            settings["precision"] = trainer.precision
        if trainer.world_size > 1 or type(trainer.strategy).__name__ != "SingleDeviceStrategy":
            self.notes.append(
                f"The Trainer uses {type(trainer.strategy).__name__} on {trainer.world_size} device(s). Trials ran on one"
                " device without it."
            )
        self.validation = {
            "limit_val_batches": trainer.limit_val_batches,
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            "val_check_interval": trainer.val_check_interval,
        }
        bar: Any = trainer.progress_bar_callback
        strategy: Any = getattr(trainer.strategy, "_ddp_kwargs", {})
        self.planned = {
            "find_unused_parameters": bool(strategy.get("find_unused_parameters")),
            "progress_bar_rate": 0 if bar is None else int(getattr(bar, "refresh_rate", 1) or 0),
            "log_every_n_steps": int(getattr(trainer, "log_every_n_steps", 50)),
        }
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        return settings, [one for one in callbacks if not is_a(one, *LEFT_OUT)]

    @property
    def precision(self) -> str:
        """The precision of the run, or the name of its precision plugin."""
        if "plugins" in self.settings:
            return type(self.settings["plugins"][0]).__name__
        return str(self.settings.get("precision", "32-true"))

    @property
    def callbacks(self) -> tuple[str, ...]:
        """The class names of the run's own callbacks."""
        return tuple(type(one).__name__ for one in self._callbacks)

    def seed(self) -> None:
        """Seed a trial: every trial begins with the same random state, and seeds its loader's workers as the run does."""
        seed_everything(SEED, workers=self._seeds_workers, verbose=False)

    def module(self) -> LightningModule:
        """A fresh copy of the module."""
        return self._make()

    def build(self, change: Change, hooks: Sequence[Any] = (), *, first: Sequence[Any] = ()) -> Built:
        """A fresh Trainer and module with a change.

        Args:
            change: what differs from the run's own configuration.
            hooks: callbacks of the trial itself, behind all others.
            first: callbacks of the trial itself, in front of all others.
        """
        module = self._make()
        own = [_copied(one) for one in self._callbacks]
        settings = {**self.settings, **change.trainer}
        if change.plugins:
            settings.pop("precision", None)
            settings["plugins"] = [made(one) for one in change.plugins]
        elif "precision" in change.trainer:
            settings.pop("plugins", None)
        else:
            settings.update({"plugins": [_copied(one) for one in settings["plugins"]]} if "plugins" in settings else {})
        trainer = self._trainer(
            **{
                "max_epochs": 1,
                **settings,
                "callbacks": [*first, *own, *(made(one) for one in change.callbacks), *hooks],
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "num_sanity_val_steps": 0,
                "limit_val_batches": change.trainer.get("limit_val_batches", 0),
                "default_root_dir": self.folder,
            }
        )
        trainer.loggers = [like(module, DummyLogger)()]
        steps, epochs = self.steps
        if steps != -1:  # schedules are laid out over the user's limits, and the run does not stop there
            trainer.fit_loop.epoch_loop.max_steps = Horizon(steps)
        trainer.fit_loop.max_epochs = -1 if epochs == -1 else Horizon(1000 if epochs is None else epochs)
        return Built(trainer, module, self._fresh_data())

    def _fresh_data(self) -> dict[str, Any]:
        if not is_a(self._data, LightningDataModule):
            return {name: isolated(loader) for name, loader in self._data.items()}
        data = copy.copy(self._data)
        for name in ("train_dataloader", "val_dataloader"):
            if is_overridden(name, data):
                setattr(data, name, _isolating(getattr(data, name)))
        return {"datamodule": data}


def isolated(loaders: Any) -> Any:
    """Loaders that share their data sets with the given ones, and nothing that changes while they are read.

    Samplers and generators continue where the last epoch ended. Each trial begins with the same batches only if it has its own,
    and the user's stay as they were.
    """
    if isinstance(loaders, Mapping):
        return {name: isolated(one) for name, one in loaders.items()}
    if type(loaders) in (list, tuple):
        return type(loaders)(map(isolated, loaders))
    if not isinstance(loaders, DataLoader):
        return loaders
    fresh = copy.copy(loaders)
    own, shared = vars(fresh), (loaders.dataset, loaders.collate_fn, loaders.worker_init_fn)
    memo = {id(one): one for one in shared}
    for name in ("generator", "sampler", "batch_sampler"):
        with suppress(Exception):  # what cannot be copied is shared
            own[name] = copy.deepcopy(own[name], memo)
    own["_iterator"] = None  # of persistent workers
    return fresh


def _isolating(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        return isolated(make())

    return made


def from_configs(paths: Sequence[str], folder: str) -> Subject:
    """The run that ``lightning-eff fit`` would start with these configs.

    Raises:
        UsageError: for a config that cannot be used.
    """
    arm = Arm("baseline", "baseline", tuple(map(os.fspath, paths)))
    with undisturbed():
        built = arm.build(SEED)

    def again() -> LightningModule:
        with undisturbed():
            return arm.build(SEED).module

    module = built.module if _why_no_copy(built.module) is None else again
    return Subject(module, dict(built.data), built.trainer, folder=folder, configs=paths)


def _why_no_copy(module: Any) -> str | None:
    try:
        copy.deepcopy(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _maker(module: Any) -> Callable[[], Any]:
    """A function that returns a new module each time.

    Raises:
        UsageError: for something else than a LightningModule or such a function.
    """
    if is_a(getattr(module, "_orig_mod", module), LightningModule):
        if (why := _why_no_copy(module)) is not None:
            raise UsageError(
                f"advise(module={type(module).__name__}): trials train copies of the module, and it cannot be copied ({why})."
                f" Pass a function that returns a new one: advise(lambda: {type(module).__name__}(...), ...)."
            )
        return lambda: copy.deepcopy(module)
    if callable(module):
        found = module()
        if is_a(getattr(found, "_orig_mod", found), LightningModule):
            return module
        raise UsageError(
            f"advise(module=...): the function returned a {type(found).__name__}. Return a new LightningModule each time."
        )
    raise UsageError(
        f"advise(module={type(module).__name__}): expected a LightningModule, or a function that returns a new one. Pass your"
        " module."
    )


def _copied(one: Any) -> Any:
    try:
        return copy.deepcopy(one)
    except Exception as error:
        name = type(one).__name__
        raise UsageError(
            f"advise(trainer=...): {name} cannot be copied for the trials ({type(error).__name__}: {error}). Remove {name} from"
            " the Trainer that you pass."
        ) from None


def _prepared(data: Any) -> Any:
    """A data module that is set up, or fit's arguments. Trials set nothing up again, so a slow ``setup`` runs once."""
    if isinstance(data, Mapping) and "datamodule" in data:
        data = data["datamodule"]
    if data is None:
        return {}
    if is_a(data, LightningDataModule):
        data = copy.copy(data)
        data.prepare_data()
        data.setup("fit")
        for name in ("prepare_data", "setup", "teardown"):
            setattr(data, name, _nothing)
        return data
    if isinstance(data, Mapping) and not {"train_dataloaders", "val_dataloaders"}.isdisjoint(data):
        return dict(data)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], DataLoader):
        return {"train_dataloaders": data[0], "val_dataloaders": data[1]}
    return {"train_dataloaders": data}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A hook of a data module that has run already."""


def _planned(trainer: Trainer | None) -> tuple[int, int | None]:
    """A Trainer's limits: steps, or -1, and epochs, or None."""
    return (-1, None) if trainer is None else (trainer.max_steps, trainer.max_epochs)
