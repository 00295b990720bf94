"""What a fit does, hook by hook: order, arguments, learning rates, random state and logged values."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric

from lightning_eff import ExactResume

#: Called as any run begins or ends, so in a resumed run too.
OF_EVERY_RUN = ("setup", "teardown", "fit_start", "fit_end", "train_start", "exception", "checkpoint", "sanity")
_SKIPPED = ("on_before_batch_transfer", "on_after_batch_transfer")


class Trace:
    """The events of one run, each with what a hook could see."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.trainer: Any = None

    def add(self, owner: str, hook: str, args: Iterable[Any] = ()) -> None:
        if any(name in hook for name in OF_EVERY_RUN) or self.trainer is None or self.trainer.sanity_checking:
            return
        t = self.trainer
        lrs = [group["lr"] for optimizer in t.optimizers for group in optimizer.param_groups]
        metrics = digest({k: v for k, v in dict(t.callback_metrics).items() if not k.startswith("eff/")})
        logged = digest({k: v for k, v in dict(t.logged_metrics).items() if not k.startswith("eff/")})
        weights = digest(t.lightning_module.state_dict())
        state = (t.current_epoch, t.global_step, lrs, metrics, logged, weights, random_state())
        self.events.append((owner, hook, [digest(arg) for arg in args], *state))


def digest(value: Any) -> Any:
    """Equal for equal values, short, and independent of autograd."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.detach().double().sum().item(), value.detach().double().abs().max().item())
    if isinstance(value, dict):
        return {key: digest(item) for key, item in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [digest(item) for item in value]
    return value if isinstance(value, int | float | str | type(None)) else type(value).__name__


def random_state() -> str:
    return hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]


def _hooks(cls: type) -> list[str]:
    return [name for name in dir(cls) if name.startswith("on_") and name not in _SKIPPED and "checkpoint" not in name]


class Tracer(pl.Callback):
    """Records each of its hooks."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.name, self.trace = name, trace

    @property
    def state_key(self) -> str:
        return f"Tracer{self.name}"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trace.trainer = trainer


def _recording(name: str) -> Callable[..., None]:
    def hook(self: Any, trainer: Any, module: Any, *args: Any) -> None:
        self.trace.add(self.name, name, [a for a in args if not isinstance(a, torch.optim.Optimizer)])

    return hook


for _name in _hooks(pl.Callback):
    setattr(Tracer, _name, _recording(_name))


class Logs(DummyLogger):
    """Records what is logged."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {key: value for key, value in metrics.items() if not key.startswith("eff/")}
        self.trace.events.append(("logger", step, digest(kept)))


class Traced(pl.LightningModule):
    """Changes weights, draws numbers and logs in the hooks that come after a checkpoint is saved."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.target = nn.Linear(6, 1).requires_grad_(False)
        self.mean, self.largest = MeanMetric(), MaxMetric()
        self.trace, self.scheduler = trace, "plateau"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.add("module", "training_step", [batch, batch_idx])
        x, y = batch
        loss = (self.net(x)[:, 0] - y).square().mean() + 0.1 * self.target(x).square().mean()
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("least", loss, reduce_fx="min", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trace.add("module", "validation_step", [batch, batch_idx])
        x, y = batch
        loss = (self.net(x)[:, 0] - y).square().mean() + 0.01 * torch.rand(())
        self.largest(loss)
        self.log("val_loss", loss)
        self.log("val_step", loss, on_step=True, on_epoch=True)
        self.log("val_max", self.largest)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.add("module", "on_train_batch_end", [outputs, batch, batch_idx])
        with torch.no_grad():
            self.target.weight.lerp_(batch[0].mean(0, keepdim=True), 0.1 * float(outputs["loss"]) / (1 + batch_idx))
            self.target.bias.add_(0.01 * torch.randn(1))
        self.log("target", self.target.weight.sum(), on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.trace.add("module", "on_validation_epoch_end")
        self.log("val_drawn", torch.rand(()))

    def on_validation_end(self) -> None:
        self.trace.add("module", "on_validation_end")
        self.target.bias.add_(0.01 * torch.randn(1))

    def on_train_epoch_end(self) -> None:
        self.trace.add("module", "on_train_epoch_end")
        with torch.no_grad():
            self.target.weight.mul_(0.9)
        self.log("at_end", self.target.weight.sum())

    def on_train_epoch_start(self) -> None:
        self.trace.add("module", "on_train_epoch_start")
        with torch.no_grad():
            self.target.weight.add_(0.01 * torch.randn(1))
        self.net[0].requires_grad_(self.current_epoch != 1)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.trace.add("module", "lr_scheduler_step", [metric])
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)
        schedulers = torch.optim.lr_scheduler
        kind, _, monitor = self.scheduler.partition(":")
        if kind == "cosine":
            return [optimizer], [schedulers.CosineAnnealingLR(optimizer, 5)]
        interval = "step" if kind == "plateau_step" else "epoch"
        made = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=0.05)
        config = {"scheduler": made, "monitor": monitor or "val_loss", "interval": interval, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Marks(pl.Callback):
    """Notes, for each checkpoint, how many events came before it."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.saved = trace, []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.saved.append(len(self.trace.events))


class SavesIn(pl.Callback):
    """Saves by hand in a hook, each ``every`` times that it is called."""

    def __init__(self, folder: Path, hook: str, every: int = 1) -> None:
        self.folder, self.hook, self.every, self.count = folder, hook, every, 0
        setattr(self, hook, self._save)

    def _save(self, trainer: pl.Trainer, *args: Any) -> None:
        self.count += 1
        if self.count % self.every == 0 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{self.count:03d}.ckpt")


class Files(pl.Callback):
    """Copies each checkpoint away, so that none is overwritten or removed: ``save_last`` and ``save_top_k`` do both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        save = trainer.save_checkpoint

        def save_too(path: Any, *args: Any, **kwargs: Any) -> None:
            self.count += 1
            save(path, *args, **kwargs)
            if trainer.is_global_zero:
                copy = self.folder / f"{self.count:03d}.ckpt"
                copy.write_bytes(Path(path).read_bytes())

        trainer.save_checkpoint = save_too


def data(seed: int, count: int = 22) -> DataLoader:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return DataLoader(TensorDataset(x, x.sum(1) + torch.randn(count, generator=g)), batch_size=4, shuffle=True)


def run(
    folder: Path,
    savers: Callable[[], list[pl.Callback]],
    *,
    resume: Path | None = None,
    validates: bool = True,
    make: Callable[[Trace], pl.LightningModule] = Traced,
    scheduler: str = "plateau",
    train: Callable[[], Any] = lambda: data(0),
    **settings: Any,
) -> tuple[Trace, list[int]]:
    """One fit, from the start or from ``resume``; its events, and how many came before each checkpoint."""
    trace = Trace()
    pl.seed_everything(7 if resume else 3, verbose=False)
    module, marks = make(trace), Marks(trace)
    vars(module)["scheduler"] = scheduler
    own = [] if resume else [Files(folder)]
    settings = {"max_epochs": 3, "log_every_n_steps": 2, **settings}
    trainer = pl.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=Logs(trace),
        default_root_dir=folder / "root",
        callbacks=[*own, ExactResume(), Tracer("before", trace), *savers(), Tracer("after", trace), marks],
        **settings,
    )
    trainer.fit(module, train(), data(1, 8) if validates else None, ckpt_path=resume)
    trace.events.append(("end", digest(module.state_dict()), trainer.global_step, trainer.current_epoch))
    return trace, marks.saved


def resumed_differences(
    folder: Path, savers: Callable[[Path], list[pl.Callback]], *, few: bool = False, **settings: Any
) -> dict[str, Any]:
    """For some checkpoints of a run, the first event in which a run that resumes from it differs."""
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    whole, saved = run(kept, lambda: savers(folder / "a"), **settings)
    assert saved, "the schedule saved nothing"
    found: dict[str, Any] = {}
    count = len(saved)
    for number in sorted({1, count // 2} if few else {1, count // 3 or 1, count // 2 + 1, 2 * count // 3 or 1, count}):
        before = saved[number - 1]
        torch.load(kept / f"{number:03d}.ckpt", weights_only=True)
        again, _ = run(kept, lambda: savers(folder / "b"), resume=kept / f"{number:03d}.ckpt", **settings)
        expected = whole.events[before:]
        pairs = list(zip(expected, again.events, strict=False))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None or len(expected) != len(again.events):
            at = min(len(pairs), first if first is not None else len(pairs))
            found[f"{number} of {len(saved)}"] = (
                at,
                expected[max(at - 1, 0) : at + 1],
                again.events[max(at - 1, 0) : at + 1],
            )
    return found


def model_checkpoint(folder: Path, **settings: Any) -> list[pl.Callback]:
    return [ModelCheckpoint(folder, **{"save_top_k": -1, **settings})]
