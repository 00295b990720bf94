"""The clock of a benchmark run: it counts the budget, sets the learning rate, validates, stops and records the run."""

import functools
import hashlib
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_eff._core._samples.counting import counting
from lightning_eff._core.batches import num_samples, num_tokens, tensors
from lightning_eff._core.losses import loss_of
from lightning_eff._core.patches import Patches
from lightning_eff._core.progress import Clock
from lightning_eff._core.steps import Cost
from lightning_eff._core.technique import techniques_of
from lightning_eff.bench.inspection import facts, raw, training_data
from lightning_eff.bench.learning_rate import Rates, rates_of
from lightning_eff.bench.pace import Diverged, Horizon, Incomparable, Pace, Rehearsed
from lightning_eff.bench.running.quiet import Quiet
from lightning_eff.bench.running.turns import TURN
from lightning_eff.bench.watching import Samples, blind, draw_alike, exchange, watch, weights
from lightning_eff.monitor.machine import memory_in_use


class Pacer(Clock):
    """Run one arm of a benchmark within its budget, regardless of the Trainer's own limits.

    It must be the Trainer's first callback. Schedulers follow the fraction ``u`` of the budget that is used: at ``u``, each has
    made ``u * steps`` of its steps. So every arm decays fully over the budget, whatever its number of steps. Validation is at
    fixed fractions too.

    Training seconds run from the end of one batch to the end of the next. They include all work of a recipe: loading,
    scoring, growth, hooks. Validation does not count, except for passes over training data that a technique makes there.

    Args:
        pace: the pace of the run.
        progress: a function that is called with the used fraction of the budget after each step.
        pass_on: a function that is called every few batches of a rehearsal, to give other arms their turn.
    """

    def __init__(
        self,
        pace: Pace,
        progress: Callable[[float], None] | None = None,
        pass_on: Callable[[], object] | None = None,
    ) -> None:
        self.pace = pace
        self._progress = progress
        self._pass_on = pass_on
        self._patches = Patches()
        self._mark = self._outside = self._pending = 0.0
        self._calls: list[str] = []
        self._known: set[str] = set()
        self._factors: deque[float] = deque(maxlen=50)
        self._evaluated = 0
        self._due = False
        self._rates: Rates
        self._losses: list[tuple[float, float]] = []
        self._began = time.perf_counter()
        # the figures of the run's record
        self.seconds = self.wall_seconds = self.setup_seconds = self.warmup_seconds = self.caused_seconds = 0.0
        self.validation_seconds = self.extra_seconds = self.uncalibrated = 0.0
        self.steps = self.samples = self.tokens = self.forward_passes = 0
        self.quiet = Quiet()
        self.kinds: list[str] = []  # of each batch
        self.times: list[float] = []  # wall-clock seconds of each batch
        self.losses: list[float] = []  # of each batch
        self.rates: list[tuple[float, float]] = []  # (u, learning rate) of each optimizer step
        self.points: list[dict[str, float]] = []
        self.memory: list[tuple[float, int]] = []
        self.last_rate = self._led = 0.0
        self.metrics: dict[str, float] = {}
        self.validation_data: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.watched = Samples()
        self.ahead: int | None = None  # samples that reached the module with gradients before the first step

    # -- the clock

    @override
    def share(self) -> float:
        if self.pace.sweep is not None:
            return min(self.steps / self.pace.sweep, 1.0)
        return min(self.seconds / self.pace.budget, 1.0)

    def _charge(self, wall: float, kind: str) -> float:
        """Return the budget seconds of a batch of this kind that took ``wall`` seconds."""
        price = self.pace.prices.get(kind)
        first = kind not in self._known
        self._known.add(kind)
        speed = self._speed()
        if price is None:
            if not self.pace.reference:
                return wall
            cost = wall * speed
            self.uncalibrated += cost
            return cost
        excess = wall - price / speed if first else 0.0
        if excess <= 0.5 * price / speed:
            excess = 0.0
        self._factors.append(price / max(wall - excess, 1e-9))
        if not excess and self.pace.reference:
            self.quiet.step(wall, price)
        charge = price if self.pace.reference else wall - excess
        if self.steps == 0 or kind in self.pace.common:  # compilation and allocation, which the baseline has too
            self.warmup_seconds += excess
            return charge
        cost = excess * speed if self.pace.reference else excess
        self.caused_seconds += cost
        return charge + cost

    def _speed(self) -> float:
        """Return the machine's present speed relative to the step costs."""
        return median(self._factors) if self._factors else 1.0

    # -- Lightning's hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size != 1:
            raise Incomparable(
                f"Got a Trainer with {trainer.world_size} devices; expected one, because the bench paces one process. Set"
                " devices=1."
            )
        for name in ("fast_dev_run", "barebones"):
            if getattr(trainer, name, False):
                raise Incomparable(
                    f"Got a Trainer with {name}={getattr(trainer, name)}; expected one that trains and validates on all of its"
                    f" data, and logs metrics. Remove {name}."
                )
        loop = trainer.fit_loop
        epoch_loop = loop.epoch_loop
        self._patches.set(loop, "min_epochs", 0)
        self._patches.set(epoch_loop, "min_steps", None)
        self._patches.set(loop, "max_epochs", Horizon(2**31))
        self._patches.set(epoch_loop, "max_steps", Horizon(self._laid_out(pl_module)))
        self._patches.set(epoch_loop, "_should_check_val_fx", lambda fetcher: self._due)
        self._patches.set(epoch_loop, "update_lr_schedulers", lambda interval, update_plateau_schedulers: None)
        self._patches.set(epoch_loop.val_loop, "run", self._validating(trainer, epoch_loop.val_loop.run))
        self._patches.set(pl_module, "training_step", self._recording(trainer, pl_module.training_step))
        if self.pace.check_target and trainer.limit_val_batches:
            self._patches.set(trainer, "limit_val_batches", 1)
        if self.pace.watch:
            watch(trainer, pl_module, self.watched, self._patches)
        if self.pace.blind:
            blind(trainer, pl_module, self._patches)
        self._patches.set(pl_module, "configure_optimizers", self._laying_out(trainer, pl_module.configure_optimizers))

    def _recording(self, trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            shapes = dict.fromkeys("x".join(map(str, t.shape)) for arg in args[:1] for _, t in tensors(arg))
            call = ",".join(shapes) + ("" if torch.is_grad_enabled() else " forward")
            session = _session(trainer)
            for path, shown, trained in session.signature() if session is not None else ():
                call += f" {path}:{shown}/{trained}"
            self._calls.append(call)
            return original(*args, **kwargs)

        training_step.__wrapped__ = inspect.unwrap(original)  # Lightning looks through one wrapper only
        return training_step

    def _laid_out(self, module: LightningModule) -> int:
        """Return the length of the module's schedule. A rehearsal shortens it if the module steps it itself."""
        return self.pace.steps if module.automatic_optimization or self.pace.sweep is None else self.pace.sweep

    def _laying_out(self, trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def configure_optimizers() -> Any:
            if trainer.train_dataloader is None:
                trainer.fit_loop.setup_data()
            batches = trainer.num_training_batches
            epochs = 1
            if math.isfinite(batches) and batches > 0:
                steps = self._laid_out(trainer.lightning_module)
                epochs = math.ceil(steps / math.ceil(batches / trainer.accumulate_grad_batches))
            trainer.fit_loop.max_epochs = Horizon(max(epochs, 1))
            return original()

        configure_optimizers.__wrapped__ = inspect.unwrap(original)
        return configure_optimizers

    def _validating(self, trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> Any:
            _synchronize(trainer)
            before_it = weights(trainer.lightning_module) if self.pace.watch else None
            cost = _cost(trainer)
            before, start = cost.seconds, time.perf_counter()
            if self.pace.keep or self.pace.take:
                draw_alike()  # before the loader does
            if self.pace.check_target:
                self._check_target(trainer, original)
                raise Rehearsed
            outputs = original()
            _synchronize(trainer)
            seconds = time.perf_counter() - start
            if before_it is not None and before_it != (now := weights(trainer.lightning_module)):
                if not all(map(math.isfinite, before_it + now)):  # nan differs from itself
                    raise Diverged(f"weights are not finite at step {self.steps}.")
                raise Incomparable(
                    "Got a module whose weights change during validation; expected them to stay the same, because validation"
                    " does not count against the budget. Train in training_step."
                )
            extra = cost.seconds - before
            self._outside += seconds - extra  # passes of a technique count as training
            self.validation_seconds += seconds - extra
            self.seconds += extra * self._speed() if self.pace.reference else 0.0
            self._read_metrics(trainer, outputs)
            if self.pace.sweep is not None:
                raise Rehearsed
            return outputs

        return run

    def _check_target(self, trainer: Trainer, validate: Callable[[], Any]) -> None:
        """Validate one batch, and refuse a target that is not among the logged metrics.

        Some modules need more than one batch. A validation that raises or logs nothing is therefore no reason to refuse.
        """
        try:
            self._read_metrics(trainer, validate())
        except Incomparable:
            if self.metrics:
                raise
        except Exception:
            return

    def _read_metrics(self, trainer: Trainer, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Take the target from the metrics that a validation has logged."""
        self._due = False
        logged = {name for output in outputs for name in output}
        known = trainer.callback_metrics
        self.metrics = {name: float(known[name]) for name in known if name in logged or _over_epoch(name) in logged}
        target = self.pace.target
        if target not in self.metrics:
            elsewhere = " (training logs it, or each step separately)" if target in known else ""
            raise Incomparable(
                f"Got target {target!r}, which validation does not log{elsewhere}; expected"
                f" one of {sorted(self.metrics) or 'its metrics, but it logs none'}. Set --target to one of them, or"
                " log it in validation_step, in every validation."
            )
        self.points.append(
            {
                "seconds": self.seconds,
                "wall_seconds": self.wall_seconds,
                "step": self.steps,
                "samples": self.samples,
                "tokens": self.tokens,
                "metric": self.metrics[target],
            }
        )
        self.memory.append((self.seconds, memory_in_use(trainer.strategy.root_device)))
        if not math.isfinite(self.metrics[target]):
            raise Diverged(f"{target} is {self.metrics[target]} at step {self.steps}.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            raise Incomparable(
                "Got a run without validation; expected a validation_step that logs the target, and validation data. Add them,"
                " or set limit_val_batches > 0."
            )
        self._rates = rates_of(trainer, self.pace)
        self.last_rate = self._led = self._rates.follow(self.share())
        if self.pace.inspect:
            self.facts = facts(trainer, pl_module)
        _synchronize(trainer)
        self.quiet.begin()
        self._mark = time.perf_counter()
        self.setup_seconds = self._mark - self._began
        self.memory.append((0.0, memory_in_use(trainer.strategy.root_device)))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._calls.clear()
        if self.ahead is None:
            self.ahead = self.watched.count
        with counting(trainer, tensors(batch)):
            self.samples += num_samples(batch)
            self.tokens += num_tokens(batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = not trainer.fit_loop.epoch_loop._should_accumulate()
        if self.pace.sweep is not None:
            _synchronize(trainer)
        now = time.perf_counter()
        seconds = now - self._mark - self._outside
        self._outside = 0.0
        kind = " + ".join(self._calls) + ("" if stepped else " (accumulates)")
        before = self.warmup_seconds
        charge = self._charge(seconds, kind)
        self.seconds += charge
        self._pending += charge
        self.wall_seconds += seconds - (self.warmup_seconds - before)
        self.kinds.append(kind)
        self.times.append(seconds)
        self._watch(trainer, outputs)
        if stepped:
            charge, self._pending = self._pending, 0.0  # of all batches of the step
            self._step(trainer, charge)
        if self._pass_on is not None and len(self.times) % TURN == 0:
            self._pass_on()
        self._mark = time.perf_counter()  # the bench's own work does not count

    def _step(self, trainer: Trainer, charge: float) -> None:
        """Update the run after an optimizer step."""
        used, led = self._rates.largest(), self._led
        self.rates.append((self.share(), used))
        self.steps += 1
        self._led = self._rates.follow(self.share())
        self.last_rate = self._led if used == led else used  # a technique may set another one
        cost = _cost(trainer)
        self.extra_seconds, self.forward_passes = cost.seconds, cost.forward_passes
        u = self.share()
        if self.pace.sweep is None:
            left = self.pace.budget - self.seconds
            over = left <= charge / 2  # ends with the step whose end is nearest to the budget's
            self._due = over or u * self.pace.evaluations + 1e-9 >= self._evaluated + 1
            self._evaluated = max(self._evaluated, math.floor(u * self.pace.evaluations + 1e-9))
        else:
            over = self.steps >= self.pace.sweep
            self._due = over and (self.pace.inspect or self.pace.check_target)
        if over and self.pace.sweep is not None and not self._due:
            raise Rehearsed
        if over:
            trainer.should_stop = True
        if self._progress is not None:
            self._progress(1.0 if over else u)

    def _watch(self, trainer: Trainer, outputs: Any) -> None:
        """Record the loss; on an accelerator only every 20 batches, because reading it waits for the device."""
        loss = loss_of(outputs)
        waits = trainer.strategy.root_device.type != "cpu" and self.pace.sweep is None
        if not isinstance(loss, torch.Tensor) or (waits and len(self.times) % 20):
            return
        value = float(loss.detach())
        self.losses.append(value)
        self._losses.append((self.seconds, value))
        if not math.isfinite(value):
            raise Diverged(f"the training loss is {value} at step {self.steps}.")

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == dataloader_idx == 0 and (self.pace.keep or self.pace.take):
            exchange(pl_module, keep=self.pace.keep, take=self.pace.take)
        if self.pace.watch and not self.points:  # later validations have the same data
            self.watched.validated(batch)
        if self.pace.inspect:
            for path, tensor in tensors(batch):
                key = f"{dataloader_idx}{path} {tensor.dtype} {tuple(tensor.shape[1:])}"
                digest = self.validation_data.setdefault(key, hashlib.sha1())  # independent of the batch size
                digest.update(raw(tensor))

    def release(self) -> None:
        """Undo all patches. Call it after the fit, because techniques undo theirs when it ends."""
        self._patches.restore()

    # -- results

    def rate(self) -> dict[str, float]:
        """Return the peak of the learning rate, the fraction of the budget at which it is reached, and the last value."""
        peak = max((rate for _, rate in self.rates), default=0.0)
        at = next((u for u, rate in self.rates if rate == peak), 0.0)
        return {"peak": peak, "last": self.last_rate, "peak_at": at}

    def loss_curve(self, most: int = 200) -> list[tuple[float, float]]:
        """Return the training loss over the budget in at most ``most`` points: the first batch, then means of neighbours."""
        first, rest = self._losses[:1], self._losses[1:]
        size = math.ceil(len(rest) / (most - 1)) or 1
        chunks = [first, *(rest[i : i + size] for i in range(0, len(rest), size))] if first else []
        return [(chunk[-1][0], sum(loss for _, loss in chunk) / len(chunk)) for chunk in chunks]

    def data(self, trainer: Trainer) -> dict[str, Any]:
        """Return fingerprints of the validation data and of the training data set."""
        validation = {path: digest.hexdigest() for path, digest in sorted(self.validation_data.items())}
        return {"validation": validation, "training": training_data(trainer)}


def _over_epoch(name: str) -> str:
    """Return Lightning's other name for a metric's mean over a validation whose steps are logged too."""
    head, separator, index = name.partition("/dataloader_idx_")
    return f"{head}_epoch{separator}{index}"


def _session(trainer: Trainer) -> Any:
    return next((t._session for t in techniques_of(trainer) if t._session is not None), None)


def _cost(trainer: Trainer) -> Any:
    """Return the cost of extra passes so far."""
    session = _session(trainer)
    return Cost() if session is None else session.chain.cost


def _synchronize(trainer: Trainer) -> None:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
