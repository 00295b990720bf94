"""Settings that a recipe needs and no config has: fused optimizers, TF32, worker processes, and others for measuring alone."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both
from lightning_eff._core._loaders.proxy import LoaderProxy
from lightning_eff._core.patches import Patches


def users_own(loader: Any) -> Any:
    """The loader that a run was given, where a technique has put a proxy around it."""
    while isinstance(loader, LoaderProxy):
        loader = vars(loader)["_loader"]
    return loader


def plain_loader(loader: Any) -> str | None:
    """Why a loader cannot be built again with other settings; None where it can."""
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}, and only a plain DataLoader can be built again"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable, so it decides itself what each worker reads"
    if loader.batch_size is None:
        return "it has a batch sampler of its own"
    return None


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A plain DataLoader with other settings.

    Raises:
        ValueError: if it cannot be built again.
    """
    if (why := plain_loader(loader)) is not None:
        raise ValueError(f"DataLoader: {why}. Change it in your code.")
    names = (
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "prefetch_factor",
        "persistent_workers",
        "generator",
    )
    same = {name: getattr(loader, name) for name in names}
    same |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "collate_fn": loader.collate_fn}
    sampler = loader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        same["shuffle"] = True
    elif type(sampler) is not SequentialSampler:
        same["sampler"] = sampler
    settings = {**same, **changes}
    if not settings["num_workers"]:
        settings.update(prefetch_factor=None, persistent_workers=False)
    return DataLoader(loader.dataset, **settings)


class _ReplacedLoader(Callback):
    """Builds the run's training loader again with other settings."""

    def __init__(self) -> None:
        self._patches = Patches()

    def changes(self, loader: DataLoader[Any], trainer: Trainer) -> dict[str, Any]:
        """The settings that differ."""
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        source: Any = trainer.fit_loop._data_source
        original: Callable[[], Any] = source.dataloader

        def dataloader() -> Any:
            loader = original()
            return rebuilt(loader, **self.changes(loader, trainer))

        self._patches.set(source, "dataloader", dataloader)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()


@of_both
class LoaderWorkers(_ReplacedLoader):
    """Load batches in worker processes, whatever the loader's own setting.

    Workers draw the random numbers of augmentations from their own seeds. Augmentations are then others, and equally random.

    Args:
        num_workers: worker processes.
    """

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.num_workers = num_workers

    @override
    def changes(self, loader: DataLoader[Any], trainer: Trainer) -> dict[str, Any]:
        pin = trainer.strategy.root_device.type == "cuda"
        return {"num_workers": self.num_workers, "persistent_workers": True, "pin_memory": pin}


@of_both
class LargerBatch(_ReplacedLoader):
    """Train on batches of several times as many samples.

    Args:
        factor: times the loader's own batch size.
        accumulate: micro-batches per optimizer step; None leaves the Trainer's setting.
    """

    def __init__(self, factor: int, accumulate: int | None = None) -> None:
        super().__init__()
        self.factor, self.accumulate = factor, accumulate

    @override
    def changes(self, loader: DataLoader[Any], trainer: Trainer) -> dict[str, Any]:
        assert loader.batch_size is not None
        return {"batch_size": self.factor * loader.batch_size}


@of_both
class FusedOptimizer(Callback):
    """Let torch's own optimizers update all parameters in one kernel (``fused=True``), or in lists (``foreach=True``).

    The update rule is the same. Optimizers without such an implementation raise an error at the start of the fit.

    Args:
        kind: "fused" or "foreach".
    """

    def __init__(self, kind: Literal["fused", "foreach"] = "fused") -> None:
        self.kind: Literal["fused", "foreach"] = kind

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if (why := cannot_fuse(optimizer, self.kind)) is not None:
                raise ValueError(f"FusedOptimizer(kind={self.kind!r}): {why}. Remove FusedOptimizer.")
            other = "foreach" if self.kind == "fused" else "fused"
            for group in (*optimizer.param_groups, optimizer.defaults):
                group.update({self.kind: True, other: False if self.kind == "fused" else None})
            for state in optimizer.state.values():
                step = state.get("step")
                if isinstance(step, torch.Tensor) and self.kind == "fused":
                    state["step"] = step.to(trainer.strategy.root_device, torch.float32)


def cannot_fuse(optimizer: Optimizer, kind: str) -> str | None:
    """Why an optimizer has no such implementation; None where it has."""
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim") or kind not in optimizer.defaults:
        return f"{name} has no argument {kind}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if kind == "fused" and not all(torch.is_floating_point(p) for p in parameters):
        return f"{name} holds parameters that are not real numbers"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable"
    return None


@of_both
class Float32Products(Callback):
    """Set the precision of matrix products in float32 for the length of the fit: "high" lets a GPU use TF32.

    Args:
        precision: as ``torch.set_float32_matmul_precision`` takes it.
    """

    def __init__(self, precision: Literal["highest", "high", "medium"] = "high") -> None:
        self.precision: Literal["highest", "high", "medium"] = precision
        self._before: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before)
            self._before = None


@of_both
class Unlogged(Callback):
    """Skip the module's calls of ``self.log`` and ``self.log_dict`` in training, to measure their cost."""

    def __init__(self) -> None:
        self._patches = Patches()
        self.calls = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def log(*args: Any, **kwargs: Any) -> None:
            self.calls += 1

        self._patches.set(pl_module, "log", log)
        self._patches.set(pl_module, "log_dict", log)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()

    def chosen(self) -> Mapping[str, Any]:
        """How many calls there were."""
        return {"log_calls": self.calls}
