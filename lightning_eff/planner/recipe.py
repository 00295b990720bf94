"""The module, a batch and the settings that a LightningCLI config names, without a trainer and without its memory."""

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from lightning_eff._core._lightning.names import is_overridden, like
from lightning_eff._core.batches import num_samples
from lightning_eff.bench.arms import undisturbed


@dataclass(frozen=True)
class Recipe:
    """What a config says, as far as a plan needs it.

    Attributes:
        module: built under ``fake_mode``, or really, if that is None.
        batch: the train loader's first batch, real.
        batch_size: its samples.
        accumulate: gradient accumulation of the recipe.
        precision: as the trainer's section has it.
        fp8: a plugin of the trainer's section multiplies in FP8.
        fake_mode: under which the module was built.
        state_bytes: of the optimizer, for each parameter.
        optimizer: as ``configure_optimizers`` gives it; None where it could not be built.
        trainer: the trainer's section, as plain values.
        callbacks: the classes of its callbacks.
        batch_key: where the config has the batch size; None where it could not be told.
        notes: what was assumed, for people.
    """

    module: LightningModule
    batch: Any
    batch_size: int
    accumulate: int
    precision: Any
    fp8: bool
    fake_mode: FakeTensorMode | None
    state_bytes: float
    optimizer: Any
    trainer: dict[str, Any]
    callbacks: tuple[type, ...]
    batch_key: tuple[str, ...] | None
    notes: tuple[str, ...]


def read_recipe(configs: Sequence[str], *, real: bool) -> Recipe:
    """Build what the configs name, merged from left to right.

    Args:
        configs: paths of LightningCLI configs.
        real: allocate and initialise the module, rather than its shapes alone.

    Raises:
        FileNotFoundError: if a config is not there.
        ModuleNotFoundError: without jsonargparse, which LightningCLI needs.
        ValueError: if the config names no data to take a batch from, or the module cannot be built.
    """
    for path in configs:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--config {path}: there is no such file; expected a config of LightningCLI.")
    try:
        from jsonargparse import Namespace

        from lightning_eff._cli.config import ConfigCLI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed; LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        ) from error
    mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)

    class Shapes(ConfigCLI):
        """Builds the module under the fake mode, the data really, and no trainer: its hardware is elsewhere."""

        @override
        def _run_subcommand(self, subcommand: str) -> None:
            pass

        @override
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return None

        @override
        def instantiate_classes(self) -> None:
            parser = self._parser(self.subcommand)
            chosen = self.config[str(self.subcommand)]
            self.trainer_section = copy.deepcopy(chosen.get("trainer"))
            self.plain: dict[str, Any] = yaml.safe_load(parser.dump(chosen, skip_none=False, skip_check=True))
            built = Namespace()
            sections = {key: value for key, value in vars(chosen).items() if key not in ("trainer", "data")}
            with mode or nullcontext():
                built.update(parser.instantiate_classes(Namespace(sections)))
            built["data"] = parser.instantiate_classes(Namespace(data=chosen.get("data"))).get("data")
            self.config_init = Namespace({str(self.subcommand): built})
            self.datamodule, self.model, self.trainer = built.get("data"), built["model"], None
            with mode or nullcontext():
                self._add_configure_optimizers_method_to_model(self.subcommand)

    with undisturbed():
        try:
            cli = Shapes(
                ["fit", *(argument for path in configs for argument in ("--config", path))],
                datamodule_class=None,  # a module may bring its own loader
                save_config_callback=None,
            )
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"plan: the module of {', '.join(configs)} could not be built on shapes alone:"
                f" {type(error).__name__}: {error}; build it really by --profile real, on a machine where it fits."
            ) from error
    return _recipe(cli.model, cli.datamodule, cli.trainer_section, cli.plain, mode)


def _recipe(
    module: LightningModule,
    data: LightningDataModule | None,
    trainer: Any,
    plain: dict[str, Any],
    mode: FakeTensorMode | None,
) -> Recipe:
    notes: list[str] = []
    section = {} if trainer is None else dict(trainer)
    steps = int(section.get("max_steps") or -1)
    with undisturbed():
        module.trainer = like(module, Trainer)(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_steps=steps,
            max_epochs=section.get("max_epochs") or (None if steps > 0 else 1),
        )
    with undisturbed(), mode or nullcontext():
        module.setup("fit")
        module.configure_model()
    batch = _first_batch(module, data)
    optimizer, state_bytes = _optimizer(module, mode, notes)
    written = dict(plain.get("trainer") or {})
    for key in ("plugins", "callbacks"):
        value = written.get(key) or []
        written[key] = value if isinstance(value, list) else [value]
    named = [str(p["class_path"]) if isinstance(p, dict) else str(p) for p in written["plugins"]]
    size = num_samples(batch)
    key = batch_key(plain, size)
    if key is None:
        notes.append(
            f"the config has no batch_size of {size}, so the loader's batches stay: found no other to plan with"
        )
    return Recipe(
        module=module,
        batch=batch,
        batch_size=size,
        optimizer=optimizer,
        trainer=written,
        callbacks=tuple(import_object(str(c["class_path"])) for c in written["callbacks"]),
        batch_key=key,
        accumulate=int(section.get("accumulate_grad_batches") or 1),
        precision=section.get("precision"),
        fp8=any("FP8" in name or "TransformerEngine" in name for name in named),
        fake_mode=mode,
        state_bytes=state_bytes,
        notes=tuple(notes),
    )


def import_object(path: str) -> Any:
    """The class at a dotted path."""
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(home), name)


def _first_batch(module: LightningModule, data: LightningDataModule | None) -> Any:
    source: Any = data
    if data is not None:
        data.prepare_data()
        data.setup("fit")
    elif is_overridden("train_dataloader", module):
        source = module
    else:
        raise ValueError(
            f"plan: the config names no data, and {type(module).__name__} has no train_dataloader; expected one of them,"
            " to take the shapes of a batch from. Add a data: section."
        )
    with undisturbed():
        batch = next(iter(source.train_dataloader()), None)
    if batch is None:
        raise ValueError("plan: the train loader is empty; expected a first batch, to take its shapes.")
    return batch


def batch_key(config: Mapping[str, Any], size: int) -> tuple[str, ...] | None:
    """Where a config says that a batch has ``size`` samples: the one ``batch_size`` of that value, in data or model.

    A second one of that value, or none, and it cannot be told which the loader reads.
    """

    def walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("batch_size", "train_batch_size") and inner == size and not isinstance(inner, bool):
                    yield (*path, key)
                yield from walk(inner, (*path, str(key)))

    for section in ("data", "model"):
        found = list(walk(config.get(section), (section,)))
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _optimizer(module: LightningModule, mode: FakeTensorMode | None, notes: list[str]) -> tuple[Any, float]:
    """The optimizer, and its bytes of state for each parameter: a step of a like one on a small matrix is looked at."""
    configured: Any = None
    try:
        with undisturbed(), mode or nullcontext():
            configured = module.configure_optimizers()
        while isinstance(configured, list | tuple) and configured:
            configured = configured[0]
        if isinstance(configured, dict):
            configured = configured["optimizer"]
        if not isinstance(configured, torch.optim.Optimizer):
            raise TypeError(f"configure_optimizers returned {type(configured).__name__}")
        weight = nn.Parameter(torch.zeros(64, 64))
        weight.grad = torch.zeros_like(weight)
        same: Any = type(configured)
        taken = inspect.signature(same.__init__).parameters
        settings = {k: v for k, v in configured.defaults.items() if k in taken and k not in ("fused", "foreach")}
        optimizer = same([weight], **settings)
        optimizer.step()
        state = optimizer.state[weight].values()
        held = sum(t.numel() * t.element_size() for t in state if isinstance(t, torch.Tensor) and t.ndim)
        return configured, held / weight.numel()
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        notes.append(f"optimizer state assumed as AdamW's 8 bytes a parameter ({type(error).__name__}: {first})")
        return configured if isinstance(configured, torch.optim.Optimizer) else None, 8.0
