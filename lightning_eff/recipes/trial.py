"""A run's setup on a copy of the module: its optimizer, its first batch, and which techniques are refused. Nothing trains."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a, like, module_like, of_both
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff.recipes.profile import Rates, rates_of

#: Bytes of the largest module that is copied.
LARGEST = 2 * 2**30


class Untried(Exception):
    """The module cannot be set up on a copy; the message is a clause that says why."""


class _Enough(Exception):
    """Ends the run before its first step."""


@of_both
class _Stop(Callback):
    """Ends the run once the module, its optimizers and all techniques are set up."""

    def __init__(self) -> None:
        self.module: Any = None
        self.rates: Rates | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module = pl_module
        self.rates = rates_of(trainer.optimizers, scheduled=bool(trainer.lr_scheduler_configs))
        raise _Enough


class Trial:
    """Sets up copies of one module, on the CPU and in one process.

    Args:
        module: it stays as it is.
        data: a data module, a loader, or None for the module's own data.
        steps: of the run; None is a run with an end that is not known, and -1 one without an end.

    Raises:
        Untried: if the module is too large to be copied, or cannot be copied or set up.
    """

    def __init__(self, module: LightningModule, data: Any, steps: int | None) -> None:
        size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
        if size > LARGEST:
            raise Untried(f"its weights take {size / 2**30:.1f} GiB, and at most {LARGEST / 2**30:g} GiB are copied")
        self._data, self._steps = data, 1000 if steps is None else steps
        self._module = module
        try:
            stop = self._set_up([])
        except Exception as error:  # of the module's own code, or because it cannot be copied
            raise Untried(f"its setup fails on a copy, outside of a run ({_short(error)})") from error
        self.module: LightningModule = stop.module
        self.rates = stop.rates

    def refusal(self, techniques: Sequence[Callback]) -> str | None:
        """What the last of ``techniques`` is refused with on this module, beside the others; None if it is not refused.

        Raises:
            Untried: if something else than a technique fails.
        """
        try:
            self._set_up(copy.deepcopy(list(techniques)))
        except (ValueError, TypeError, ImportError, RuntimeError, NotImplementedError) as error:
            return " ".join(str(error).split())
        return None

    def _set_up(self, callbacks: list[Callback]) -> _Stop:

        stop = _Stop()
        module = copy.deepcopy(self._module)
        environments = module_like(module, "lightning.pytorch.plugins.environments")
        with undisturbed():
            trainer = like(module, Trainer)(
                accelerator="cpu",
                devices=1,
                plugins=[environments.LightningEnvironment()],
                max_steps=self._steps,
                max_epochs=-1,
                callbacks=[*callbacks, stop],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            try:
                trainer.fit(module, **_fed(self._data))
            except _Enough:
                return stop
        raise RuntimeError("the run ended before its setup did")


def first_batch(module: LightningModule, data: Any) -> Any:
    """A batch of the training data, on copies of the module and its data, with no random number drawn.

    Args:
        module: it stays as it is.
        data: a data module, a loader, a batch, or None for the module's own data.

    Raises:
        Untried: if there is none, or it cannot be loaded.
    """

    if data is not None and not is_source(data):
        return data
    try:
        with undisturbed():
            loader = data if isinstance(data, DataLoader) else _loader(module, data)
            while isinstance(loader, dict | list | tuple):
                loader = next(iter(loader.values() if isinstance(loader, dict) else loader))
            return _batch(loader)
    except Exception as error:  # of the data's own code
        raise Untried(f"no batch can be loaded ({_short(error)})") from error


def is_source(data: Any) -> bool:
    """Whether ``data`` gives batches, and is not one."""
    return isinstance(data, DataLoader) or hasattr(data, "train_dataloader")


def _loader(module: LightningModule, data: Any) -> Any:
    source = copy.deepcopy(module if data is None else data)
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()


def _batch(loader: Any) -> Any:
    """The first samples in the order of the data set, without workers; else what the loader gives first."""
    dataset: Any = getattr(loader, "dataset", None)
    size: int | None = getattr(loader, "batch_size", None)
    if isinstance(loader, DataLoader) and size and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return loader.collate_fn([dataset[i] for i in range(min(size, len(dataset)))])
    return next(iter(loader))


def _fed(data: Any) -> dict[str, Any]:
    """Arguments of fit: the real loader where it needs no preparation, else one that is never read."""
    if isinstance(data, DataLoader):
        return {"train_dataloaders": data}
    return {"train_dataloaders": DataLoader(torch.zeros(8, 1), batch_size=1)}  # pyright: ignore[reportArgumentType]


def _short(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]}" if words else type(error).__name__


def is_module(value: Any) -> bool:
    """Whether ``value`` is a LightningModule of either package."""
    return is_a(value, LightningModule)
