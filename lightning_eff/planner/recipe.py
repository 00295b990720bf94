"""The module, a batch and the settings that a LightningCLI config names, without a trainer and without its memory."""

import copy
import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

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
        from lightning.pytorch.cli import LightningCLI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed; LightningCLI needs it. Run: pip install "jsonargparse[signatures]"'
        ) from error
    mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)

    class Shapes(LightningCLI):
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
            built = Namespace()
            sections = {key: value for key, value in vars(chosen).items() if key not in ("trainer", "data")}
            with mode or nullcontext():
                built.update(parser.instantiate_classes(Namespace(sections)))
            built["data"] = parser.instantiate_classes(Namespace(data=chosen.get("data"))).get("data")
            self.config_init = Namespace({str(self.subcommand): built})
            self.datamodule, self.model, self.trainer = built.get("data"), built["model"], None
            with mode or nullcontext():
                self._add_configure_optimizers_method_to_model(self.subcommand)

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with undisturbed():
        try:
            cli = Shapes(
                LightningModule,
                subclass_mode_model=True,
                save_config_callback=None,
                args=["fit", *(argument for path in configs for argument in ("--config", path))],
            )
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"plan: the module of {', '.join(configs)} could not be built on shapes alone:"
                f" {type(error).__name__}: {error}; build it really by --profile real, on a machine where it fits."
            ) from error
    return _recipe(cli.model, cli.datamodule, cli.trainer_section, mode)


def _recipe(
    module: LightningModule, data: LightningDataModule | None, trainer: Any, mode: FakeTensorMode | None
) -> Recipe:
    notes: list[str] = []
    section = {} if trainer is None else dict(trainer)
    steps = int(section.get("max_steps") or -1)
    with undisturbed():
        module.trainer = Trainer(
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
    state_bytes = _state_bytes(module, mode, notes)
    plugins = section.get("plugins") or []
    named = [str(getattr(p, "class_path", p)) for p in (plugins if isinstance(plugins, list) else [plugins])]
    return Recipe(
        module=module,
        batch=batch,
        batch_size=num_samples(batch),
        accumulate=int(section.get("accumulate_grad_batches") or 1),
        precision=section.get("precision"),
        fp8=any("FP8" in name or "TransformerEngine" in name for name in named),
        fake_mode=mode,
        state_bytes=state_bytes,
        notes=tuple(notes),
    )


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


def _state_bytes(module: LightningModule, mode: FakeTensorMode | None, notes: list[str]) -> float:
    """Bytes of optimizer state for each parameter: a step of the same optimizer on a small matrix is looked at."""
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
        return (
            sum(t.numel() * t.element_size() for t in state if isinstance(t, torch.Tensor) and t.ndim) / weight.numel()
        )
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        notes.append(f"optimizer state assumed as AdamW's 8 bytes a parameter ({type(error).__name__}: {first})")
        return 8.0
