"""Builds the module, a batch and the settings of a LightningCLI config, without a trainer or memory for the weights."""

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
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._core.batches import num_samples


@dataclass(frozen=True)
class Recipe:
    """The parts of a config that a plan needs.

    Attributes:
        module: the module, built under ``fake_mode`` or with real tensors.
        batch: the first batch of the train loader, with real data.
        batch_size: samples in the batch.
        accumulate: the recipe's gradient accumulation.
        precision: the trainer section's precision.
        fp8: a plugin of the trainer section multiplies in FP8.
        fake_mode: the mode of the module's tensors, or None if they are real.
        state_bytes: bytes of optimizer state per parameter.
        optimizer: the result of ``configure_optimizers``, or None if that failed.
        trainer: the trainer section as plain values.
        callbacks: the classes of its callbacks.
        batch_key: path of the batch size in the config, or None if unknown.
        notes: assumptions to report.
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
    """Build the module and the data of the configs, which are merged from left to right.

    Args:
        configs: paths of LightningCLI configs.
        real: allocate and initialize the module. Otherwise its tensors have shapes but no data.

    Raises:
        FileNotFoundError: if a config does not exist.
        ModuleNotFoundError: if jsonargparse, which LightningCLI needs, is not installed.
        ValueError: if the config names no data, or the module cannot be built.
    """
    for path in configs:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--config {path}: no such file. Pass the path of a LightningCLI config.")
    try:
        from jsonargparse import Namespace

        from lightning_eff._cli.config import ConfigCLI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed, and LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        ) from error
    mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)

    class Shapes(ConfigCLI):
        """Builds the module under the fake mode, the data with real values, and no trainer, since its hardware is elsewhere."""

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
                f"--config {', '.join(configs)}: the module cannot be built without data in its tensors"
                f" ({type(error).__name__}: {error}). Pass --profile real on a machine where it fits."
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
            f"the config has no batch_size of {size} that the plan could change, so it keeps the loader's batch"
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
    """Import the object at a dotted path."""
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
            f"plan: the config names no data, and {type(module).__name__} has no train_dataloader, so there is no batch to"
            " profile. Add a data: section."
        )
    with undisturbed():
        batch = next(iter(source.train_dataloader()), None)
    if batch is None:
        raise ValueError(
            "plan: the train loader is empty, so there is no batch to profile. Add samples to the data set."
        )
    return batch


def batch_key(config: Mapping[str, Any], size: int) -> tuple[str, ...] | None:
    """Return the path of the only ``batch_size`` with the value ``size`` in the config's data or model section.

    If several have the value, the loader could read any of them, and the result is None.
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
    """Return the optimizer and its bytes of state per parameter, measured in a step on a small matrix."""
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
        notes.append(f"optimizer state assumed as AdamW's 8 bytes per parameter ({type(error).__name__}: {first})")
        return configured if isinstance(configured, torch.optim.Optimizer) else None, 8.0
