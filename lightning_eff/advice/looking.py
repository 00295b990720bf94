"""A short profile of real training steps: where time and memory go, and which trials could apply."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both
from lightning_eff._core._lightning.undisturbed import undisturbed
from lightning_eff._core.batches import num_samples
from lightning_eff._core.patches import Patches
from lightning_eff._core.search_space import RunProfile
from lightning_eff.advice._running.stopwatch import Enough, Stopwatch, lookahead
from lightning_eff.advice._running.subject import Change, Subject
from lightning_eff.advice.applied import cannot_fuse, plain_loader, users_own
from lightning_eff.advice.fused_attention import ByHand
from lightning_eff.advice.intervals import Numbers
from lightning_eff.data.tokens._packing.padding import find_padding
from lightning_eff.monitor.machine import peak_memory
from lightning_eff.tune.inspection.profiling import Found, Look

FEWEST, MOST = 8, 60  #: batches of a profile
SECONDS = 1.5  #: after which it ends, if it has enough batches
WARM_UP = 3  #: batches that its times leave out
DECAYED = 0.05  #: of the peak, at which a learning rate counts as decayed
_NEVER = 10**9  #: batches of a turn that does not end
_STEPPED = 20_000  #: steps of a scheduler that are tried


@dataclass
class View:
    """The result of a profile.

    Attributes:
        run: what techniques are asked by whether they could gain anything.
        why: how that was told, by the profile's field.
        step_seconds: mean wall-clock time per batch.
        phases: seconds per batch by phase.
        memory: bytes by kind.
        peak_bytes: of memory.
        padding: the fraction of positions that are padding; None where batches have no mask.
        samples: per optimizer step.
        steps: optimizer steps of the whole run, as planned; None where it has no end.
        by_hand: places in the user's code that compute attention by hand.
        logs: calls of ``self.log`` per batch.
        loader: facts about the training loader.
        optimizers: facts about the optimizers.
        layers: how many modules of kinds that trials ask for.
        rates: learning rates: the largest base rate, the peak and the last one.
        decays: weight decays.
        numbers: of the first optimizer step.
        failed: by the part of the profile that failed: the error, and what is therefore not known.
    """

    run: RunProfile = field(default_factory=RunProfile)
    why: dict[str, str] = field(default_factory=dict)
    step_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    padding: float | None = None
    samples: float = 1.0
    steps: int | None = None
    by_hand: list[str] = field(default_factory=list)
    logs: float = 0.0
    loader: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    decays: tuple[float, ...] = ()
    numbers: Numbers | None = None
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        """The fraction of the time that a step waits for data."""
        total = math.fsum(self.phases.values())
        return self.phases.get("data", 0.0) / total if total else 0.0

    def found(self, callbacks: tuple[str, ...]) -> Found:
        """In the form in which suggestions are asked for."""
        steps = self.steps or 1000
        return Found(
            run=self.run,
            why=self.why,
            steps=steps,
            step_seconds=self.step_seconds,
            start_seconds=0.0,
            validation_seconds=0.0,
            samples=self.samples,
            rate={"peak": self.rates.get("peak", 0.0), "last": self.rates.get("last", 0.0), "peak_at": 0.0},
            base_rate=self.rates.get("base", 0.0),
            decays=self.decays,
            callbacks=callbacks,
            metrics=(),
            monitor={"phases": self.phases, "memory": self.memory},
            peak_bytes=self.peak_bytes,
            probe={},
        )


@of_both
class _Eye(Callback):
    """Takes a profile's figures. It must be the last callback."""

    def __init__(self, view: View, look: Look, limit: float, *, inside: bool) -> None:
        self._view, self._look, self._limit, self._inside = view, look, limit, inside
        self._patches = Patches()
        self._stepping = False
        self._began = self._since = 0.0
        self._phases: dict[str, float] = {}
        self._places = self._tokens = self._logs = self._batches = self._samples = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._patches.set(loop, "_should_check_val_fx", lambda fetcher: False)
        self._patches.set(loop, "update_lr_schedulers", lambda interval, update_plateau_schedulers: None)
        if not self._inside:
            return
        original, log = pl_module.training_step, pl_module.log

        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._stepping = self._batches != 1
            if self._stepping:
                return original(*args, **kwargs)
            mode = ByHand()
            try:
                with _without_steps(trainer, pl_module), mode, torch.random.fork_rng():
                    original(*args, **kwargs)
            except Exception as error:  # with manual optimization, the backward pass: what ran before it was looked at
                if not mode.sites:
                    self._view.failed["attention written by hand"] = (
                        f"{in_short(error)}. A step without gradients failed, so attention in your code was not looked for."
                    )
            self._view.by_hand = sorted(mode.sites)
            return original(*args, **kwargs)

        def counted(*args: Any, **kwargs: Any) -> None:
            self._logs += self._stepping
            log(*args, **kwargs)

        training_step.__wrapped__ = getattr(original, "__wrapped__", original)  # pyright: ignore[reportFunctionMemberAccess]
        self._patches.set(pl_module, "training_step", training_step)
        self._patches.set(pl_module, "log", counted)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()
        steps = trainer.estimated_stepping_batches
        self._view.steps = int(steps) if math.isfinite(steps) and steps > 0 else None  # -1 for a stream without an end

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        try:
            self._samples += num_samples(batch)
        except ValueError as error:
            self._view.failed["samples"] = f"{in_short(error)}. Samples per step were not counted."
        with suppress(ValueError):  # batches without a mask that can be found; padding is None then
            keep = find_padding(batch, None, None, who="advise").keep(batch)
            if keep is not None:
                self._places, self._tokens = self._places + keep.numel(), self._tokens + int(keep.sum())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches, self._stepping = self._batches + 1, False
        watch = self._look.monitor.watch
        if self._batches == WARM_UP:
            self._since, self._phases = time.perf_counter(), dict(watch.seconds) if watch is not None else {}
        spent = time.monotonic() - self._began
        enough = self._batches >= FEWEST and spent > SECONDS
        if not (enough or self._batches >= MOST or (self._batches > WARM_UP and spent > self._limit)):
            return
        counted = self._batches - WARM_UP
        self._view.step_seconds = (time.perf_counter() - self._since) / counted
        if watch is not None:
            phases = {name: watch.seconds[name] - self._phases.get(name, 0.0) for name in (*watch.seconds,)}
            self._view.phases = {
                n: s / counted for n, s in phases.items() if s > 0 and n not in ("counting", "validation")
            }
        self._view.logs = self._logs / (self._batches - 1)
        self._view.samples = self._samples / self._batches * trainer.accumulate_grad_batches
        self._view.padding = 1 - self._tokens / self._places if self._places else None
        self._facts(trainer, pl_module)
        raise Enough

    def _facts(self, trainer: Trainer, module: LightningModule) -> None:
        view = self._view
        loader: Any = users_own(trainer.train_dataloader)
        view.loader = {
            "plain": plain_loader(loader) is None if isinstance(loader, DataLoader) else False,
            "why": plain_loader(loader),
            "workers": getattr(loader, "num_workers", None),
            "batch_size": getattr(loader, "batch_size", None),
            "ahead": lookahead(trainer),
            "length": int(trainer.num_training_batches) if math.isfinite(trainer.num_training_batches) else None,
        }
        view.optimizers = {
            kind: [why for o in trainer.optimizers if (why := cannot_fuse(o, kind)) is not None]
            for kind in ("fused", "foreach")
        }
        view.optimizers["names"] = [type(getattr(o, "_optimizer", o)).__name__ for o in trainer.optimizers]
        for kind in ("fused", "foreach"):
            view.optimizers[f"is_{kind}"] = any(g.get(kind) for o in trainer.optimizers for g in o.param_groups)
        modules = list(module.modules())
        convolutions = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        view.layers = {
            "convolutions": sum(isinstance(m, convolutions) for m in modules),
            "norms": sum(
                "norm" in type(m).__name__.lower() and "batch" not in type(m).__name__.lower() for m in modules
            ),
            "linear": sum(isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D" for m in modules),
            "dropout": sum(isinstance(m, nn.Dropout) and m.p > 0 for m in modules),
        }
        view.rates = _rates(trainer, view.steps, view.failed)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()


def in_short(error: BaseException) -> str:
    """An error in one line, without a full stop at its end."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _without_steps(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Compute no gradient, and undo what a step with manual optimization changes before it would."""
    patches, trained = Patches(), {p: p.requires_grad for p in module.parameters()}
    toggled = dict(getattr(module, "_param_requires_grad_state", {}))
    for name in ("backward", "optimizer_step"):
        patches.set(trainer.strategy, name, lambda *args, **kwargs: None)
    try:
        with torch.no_grad():
            yield
    finally:
        patches.restore()
        for parameter, own in trained.items():
            parameter.requires_grad = own
        module._param_requires_grad_state = toggled


def _rates(trainer: Trainer, steps: int | None, failed: dict[str, str]) -> dict[str, float]:
    """The learning rate over the planned run, by stepping the schedulers of a run that has ended; notes what ``failed``."""
    every = [float(g["lr"]) for o in trainer.optimizers for g in o.param_groups if "lr" in g]
    found = {"base": max(every, default=0.0), "peak": max(every, default=0.0), "last": max(every, default=0.0)}
    if steps is None:
        return found
    length = trainer.num_training_batches  # infinite for a stream of unknown length, which may end all the same
    for config in trainer.lr_scheduler_configs:
        each = 1 if config.interval == "step" else max(length / trainer.accumulate_grad_batches, 1)
        count = int(steps / each) // config.frequency
        if config.reduce_on_plateau or count > _STEPPED or math.isinf(each):
            return {**found, "unknown": 1.0}
        try:
            for _ in range(count):
                config.scheduler.step()  # pyright: ignore[reportCallIssue]
                now = max(float(g["lr"]) for o in trainer.optimizers for g in o.param_groups)
                found.update(peak=max(found["peak"], now), last=now)
        except Exception as error:  # of the user's scheduler, so where it ends is not known
            text = f"{in_short(error)}. The learning rate over the whole run is not known."
            failed[f"the scheduler {type(config.scheduler).__name__}"] = text
            return {**found, "unknown": 1.0}
    return found


def look(subject: Subject, change: Change | None = None, *, limit: float = 20.0) -> View:
    """Train the run for some steps, and profile its time and memory.

    Args:
        subject: the run.
        change: a stack of changes whose time and memory are wanted alone; None for the run itself.
        limit: seconds of training.

    Raises:
        Exception: whatever the run itself raises.
    """
    view, eye = View(), Look(lenient=True)
    inside = change is None
    watch = Stopwatch(_NEVER, lambda: True, lambda: None)
    hooks: list[Any] = [eye, *([watch] if inside else []), _Eye(view, eye, limit, inside=inside)]
    trainer: Any = None
    with redirect_stdout(StringIO()), undisturbed():
        subject.seed()
        built = subject.build(change or Change(), hooks)
        trainer = built.trainer
        try:
            trainer.fit(built.module, **built.data)
        except Enough:
            pass
        finally:
            eye.teardown(trainer, built.module, "fit")
            view.numbers = watch.numbers
    _sum_up(view, eye, trainer)
    return view


def _sum_up(view: View, eye: Look, trainer: Any) -> None:
    summary = eye.monitor.summary()
    view.memory = {name: size for name, size in summary["memory"].items() if size}
    device = torch.device(eye.fields.get("accelerator", "cpu"))
    view.peak_bytes = peak_memory(device).bytes
    fields: dict[str, Any] = dict(eye.fields)
    view.why = dict(eye.why)
    rates: Mapping[str, float] = view.rates
    if rates:
        fields["decayed_rate"] = "unknown" in rates or rates["last"] <= DECAYED * rates["peak"]
        view.why["decayed_rate"] = f"from {rates['peak']:.3g} to {rates['last']:.3g} over the planned run"
    if eye.dataset_length and view.steps:
        fields["epochs"] = view.steps * view.samples / eye.dataset_length
        view.why["epochs"] = f"{view.steps} steps of {view.samples:g} samples, of {eye.dataset_length}"
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        fields["memory_bound"] = view.peak_bytes > 0.8 * total
        view.why["memory_bound"] = f"a peak of {view.peak_bytes / 2**30:.3g} of {total / 2**30:.3g} GiB"
    view.run = RunProfile(**fields)
    view.decays = eye.decays
    view.rates = dict(rates)
