"""Profiles a short run of the user's config: its properties with the reasons, and where time and memory go."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_eff._cli.errors import UsageError
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._lightning.names import of_both
from lightning_eff._core.batches import num_samples, tensors
from lightning_eff._core.blocks import outermost, stacks
from lightning_eff._core.losses import LossNotVisible, ObserveLosses, check_visible, loss_of
from lightning_eff._core.patches import Patches
from lightning_eff._core.search_space import RunProfile
from lightning_eff.bench import calibration
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Diverged, Incomparable, Pace, Rehearsed
from lightning_eff.bench.running.jobs import Job, work
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
from lightning_eff.monitor.machine import peak_memory
from lightning_eff.optim.optimizers._matrices import hidden_matrices
from lightning_eff.tune.timing import LEAST, Durations, in_words

FIRST = 8  # steps of the first job
SEEDS = 3  # default number of confirming seeds
ENOUGH = 3  # steps of the first job if they take longer than the whole budget
BOUND = 0.8  # fraction of the allowed memory above which a run counts as limited by memory


@dataclass(frozen=True)
class Found:
    """The profile of a config.

    Attributes:
        run: the properties by which techniques decide whether they can gain anything.
        why: the evidence for each property, by its name.
        steps: the optimizer steps that the budget holds.
        step_seconds: the seconds of an optimizer step.
        start_seconds: the seconds to build the module, the data and the trainer, up to the first step.
        validation_seconds: the seconds of a validation.
        samples: the samples per optimizer step.
        rate: the peak learning rate, the last one, and the fraction of the budget at which the peak is reached.
        base_rate: the largest learning rate of the optimizers' groups when they were made.
        decays: the weight decays of the optimizers' groups.
        callbacks: the classes of the config's callbacks.
        metrics: the metrics that validation logs.
        monitor: :meth:`EfficiencyMonitor.summary` of the first steps.
        peak_bytes: the peak memory in these steps.
        probe: the record of the rehearsal, for comparison with other arms.
        schedule: the learning rate schedule in these steps. It is "linear" if the module's schedule follows the metric.
    """

    run: RunProfile
    why: Mapping[str, str]
    steps: int
    step_seconds: float
    start_seconds: float
    validation_seconds: float
    samples: float
    rate: Mapping[str, float]
    base_rate: float
    decays: tuple[float, ...]
    callbacks: tuple[str, ...]
    metrics: tuple[str, ...]
    monitor: Mapping[str, Any]
    peak_bytes: int
    probe: Mapping[str, Any] = field(repr=False)
    schedule: str = "own"

    def durations(self, budget: float, process: float, seeds: int, jobs: int) -> Durations:
        """Return estimated durations. See :class:`Durations` for the arguments."""
        return Durations(budget, self.step_seconds, self.start_seconds, self.validation_seconds, process, seeds, jobs)

    def record(self) -> dict[str, Any]:
        """Return the profile as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Found":
        """Read a profile from JSON."""
        lists = {name: tuple(record[name]) for name in ("decays", "callbacks", "metrics")}
        return cls(**{**record, **lists, "run": RunProfile(**record["run"])})


@of_both
class Look(Callback):
    """Inspects the module, the first batches and the optimizers of a run, and changes nothing.

    Args:
        patience: the training time in seconds after which it stops, if it saw :data:`ENOUGH` steps.
        early: whether to validate one batch after the first training batch.
        lenient: take the loader's batch size for batches whose samples cannot be counted, instead of raising ``ValueError``.
    """

    def __init__(self, patience: float = math.inf, *, early: bool = False, lenient: bool = False) -> None:
        self._patience, self._since = patience, 0.0
        self._lenient = lenient
        self._early, self._due = early, False
        self.validating = False
        self.fields: dict[str, Any] = {}
        self.why: dict[str, str] = {}
        self.base_rate = 0.0
        self.decays: tuple[float, ...] = ()
        self.dataset_length: int | None = None
        self.callbacks: tuple[str, ...] = ()
        self.follows_metric = False
        self.monitor = EfficiencyMonitor()
        self._patches = Patches()
        self._watched = False

    def _set(self, name: str, value: Any, why: str) -> None:
        self.fields[name], self.why[name] = value, why

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        original = pl_module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if self._watched or not args:
                return original(*args, **kwargs)
            self._watched = True
            return self._observed(original, args, kwargs)

        training_step.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
        self._patches.set(pl_module, "training_step", training_step)
        if self._early:
            self._validate_early(trainer)
        trainer.callbacks.append(self.monitor)  # pyright: ignore[reportAttributeAccessIssue]  # a bench leaves it out

    def _validate_early(self, trainer: Trainer) -> None:
        """Validate one batch after the first training batch, so that a wrong target shows within seconds.

        Lightning's sanity check would come earlier, but many modules log nothing in it. A metric may need more than one
        batch, so a validation that logs nothing, crashes or is not finite decides nothing here.
        """
        loop, pacer = trainer.fit_loop.epoch_loop, trainer.callbacks[0]  # pyright: ignore[reportAttributeAccessIssue]
        due, original = loop._should_check_val_fx, loop.val_loop.run
        if trainer.limit_val_batches:
            self._patches.set(trainer, "limit_val_batches", 1)

        def run() -> Any:
            if not self._due:
                return original()
            self._due, self.validating = False, True
            with suppress(Rehearsed, Diverged):
                try:
                    original()
                except Incomparable:
                    if pacer.metrics:  # it logs others
                        raise
            self.validating = False
            return []

        self._due = True
        self._patches.set(loop, "_should_check_val_fx", lambda fetcher: self._due or due(fetcher))
        self._patches.set(loop.val_loop, "run", run)

    def _observed(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first step, and check whether its loss can be split by sample."""
        try:
            observed = ObserveLosses(num_samples(args[0]))
        except ValueError as error:
            if not self._lenient:
                raise
            self._set("visible_loss", False, str(error))
            return step(*args, **kwargs)
        with observed:
            output = step(*args, **kwargs)
        loss = loss_of(output)
        try:
            if loss is None:
                raise LossNotVisible("training_step returned no loss.")
            check_visible(observed, loss)
            self._set("visible_loss", True, f"{len(observed.calls)} loss call(s) add up to the step's loss")
        except LossNotVisible as error:
            self._set("visible_loss", False, str(error))
        return output

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.monotonic()
        apart = side_by_side(pl_module, by_name=True)
        found = outermost([c for c in stacks(pl_module) if c.path not in apart])
        why = f"the stack {found[0]}" if found else "no repeated blocks"
        self._set("num_blocks", found[0].length if found else 0, why)
        matrices = hidden_matrices(pl_module)
        self._set("num_matrices", len(matrices), f"such as {next(iter(matrices))}" if matrices else "no hidden matrix")
        manual = not pl_module.automatic_optimization
        self._set("manual_optimization", manual, f"automatic_optimization is {not manual}")
        device = trainer.strategy.root_device
        self._set("accelerator", device.type, f"the trainer runs on {device}")
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        chip = f"compute capability {major}.{minor}" if device.type == "cuda" else "no CUDA device"
        self._set("float8", 10 * major + minor >= 89, chip)
        self._set("int8", 10 * major + minor >= 75, chip)
        self._set("world_size", trainer.world_size, "processes of the trainer")
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        made = [float(g[name]) for g in groups for name in ("lr", "initial_lr", "max_lr") if g.get(name) is not None]
        self.base_rate = max(made, default=0.0)
        self.decays = tuple(sorted({float(g["weight_decay"]) for g in groups if g.get("weight_decay") is not None}))
        try:
            self.dataset_length = len(trainer.train_dataloader.dataset)  # pyright: ignore[reportOptionalMemberAccess]
        except (AttributeError, TypeError):
            self.dataset_length = None
        theirs = [c for c in trainer.callbacks if c not in (self, self.monitor)]  # pyright: ignore[reportAttributeAccessIssue]
        self.callbacks = tuple(
            type(c).__name__ for c in theirs if not type(c).__module__.startswith("lightning_eff.bench")
        )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if "batch_size" not in self.fields:
            self._look_at(batch, getattr(trainer.train_dataloader, "batch_size", None))

    def _look_at(self, batch: Any, told: int | None) -> None:
        try:
            size, why = num_samples(batch), "samples of the first batch"
        except ValueError:
            if not self._lenient:
                raise
            size, why = told or 1, "the batch size of the loader"
        self._set("batch_size", size, why)
        held = [(path, t) for path, t in tensors(batch) if t.ndim and t.shape[0] == size]
        whole = [(p, t) for p, t in held if t.ndim == 2 and not t.is_floating_point() and t.dtype is not torch.bool]
        length = max((t.shape[1] for _, t in whole), default=0)
        if length > 1:
            path = next(p for p, t in whole if t.shape[1] == length)
            self._set("sequence_length", length, f"the integers batch{path} of shape (samples, {length})")
        else:
            self._set("sequence_length", None, "a batch has no 2-D tensor of integers")
        images = [(p, t) for p, t in held if t.ndim == 4 and min(t.shape[2:]) > 1]
        if images:
            path, image = images[0]
            self._set("image_side", min(image.shape[2:]), f"batch{path} of shape {tuple(image.shape)}")
        else:
            self._set("image_side", None, "a batch has no 4-D tensor")
        dense = [p for p, t in held if t.ndim >= 3 and (t.is_floating_point() or t.dtype is torch.uint8)]
        self._set("grids", bool(dense), f"batch{dense[0]}" if dense else "a batch has no tensor of three dimensions")
        hidden = [(p, float((t == -100).float().mean())) for p, t in whole]
        path, share = max(hidden, key=lambda pair: pair[1], default=("", 0.0))
        labels = f"{share:.0%} of batch{path} are -100" if path else "a batch has no labels of tokens"
        self._set("masked_labels", share > 0.5 and len(whole) > 1, labels)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        states = [s for o in trainer.optimizers for s in getattr(o, "state", {}).values() if isinstance(s, Mapping)]
        large = sum(isinstance(v, torch.Tensor) and v.numel() > 1 for state in states for v in state.values())
        self._set("optimizer_states", large > 0, f"the optimizers keep {large} tensors of more than one number")
        if trainer.global_step >= ENOUGH and time.monotonic() - self._since > self._patience:
            raise Rehearsed

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.follows_metric = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        self._patches.restore()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()


def look(arm: Arm, *, target: str, budget: float, seed: int, threads: int = 0, memory: int | None = None) -> Found:
    """Train the baseline for some steps, and return its profile.

    Args:
        arm: the baseline.
        target: the metric that validation must log.
        budget: the seconds of a run.
        seed: the seed of the run.
        threads: the number of torch threads. 0 keeps it.
        memory: the bytes that a run may use. None sets no limit.

    Raises:
        Incomparable: if the target is not logged, or the budget is too short for any schedule.
        RuntimeError: if the module crashes or diverges in these steps.
    """
    eye = Look(patience=budget, early=True)

    def watched() -> Any:
        built = arm.build(seed)
        built.trainer.callbacks.append(eye)  # pyright: ignore[reportAttributeAccessIssue]
        return tuple(built)

    def looked(schedule: str) -> dict[str, Any]:
        pace = Pace(target, steps=FIRST, sweep=FIRST, schedule=schedule)
        return work(Job(replace(arm, source=watched), seed, pace, "first", threads))

    schedule, first = "own", looked("own")
    if first["status"] == "crashed" and eye.validating:  # the whole validation set may work
        eye = Look(patience=budget)
        first = looked("own")
    if first["status"] == "refused" and eye.follows_metric:
        eye = Look(patience=budget, early=True)
        schedule, first = "linear", looked("linear")
    first = _done(first)
    per_step = len(first["times"]) / max(first["steps"], 1)
    seconds = median(first["times"][2:] or first["times"]) * per_step
    _check_length(budget, seconds)
    peak = peak_memory(torch.device(eye.fields["accelerator"]))
    sweep = calibration.sweep_steps(budget, seconds)
    steps = max(1, round(budget / seconds))
    pace = Pace(target, steps=steps, sweep=sweep, inspect=True, watch=True, schedule=schedule)
    probe = _done(work(Job(arm, seed, pace, "probe", threads)))
    prices = calibration.prices_of_one(probe)
    steps = calibration.steps_in(budget, probe, {price["kind"]: price["seconds"] for price in prices})
    samples = probe["samples"] / probe["steps"]
    fields, why = dict(eye.fields), dict(eye.why)
    rate = probe["lr"]
    fields["decayed_rate"] = schedule == "own" and rate["last"] <= calibration.DECAYED * rate["peak"]
    why["decayed_rate"] = (
        f"from {rate['peak']:.3g} to {rate['last']:.3g} over the budget's {steps} steps"
        if schedule == "own"
        else "ReduceLROnPlateau follows the metric, not the budget"
    )
    length = eye.dataset_length
    if length:
        fields["epochs"] = steps * samples / length
        why["epochs"] = f"{steps} steps of {samples:g} samples, in a training set of {length}"
    else:
        why["epochs"] = "one is assumed, because the training set has no length"
    fields["memory_bound"] = memory is not None and peak.bytes > BOUND * memory
    limit = "--memory is not set" if memory is None else f"the limit is {memory / 2**30:.3g} GiB"
    why["memory_bound"] = f"a peak of {peak.bytes / 2**30:.3g} GiB ({peak.kind}); {limit}"
    return Found(
        run=RunProfile(**fields),
        why=why,
        steps=steps,
        step_seconds=budget / steps,
        start_seconds=max(probe["total_seconds"] - probe["validation_seconds"] - math.fsum(probe["times"]), 0.0),
        validation_seconds=probe["validation_seconds"],
        samples=samples,
        rate=rate,
        base_rate=eye.base_rate,
        decays=eye.decays,
        callbacks=eye.callbacks,
        metrics=tuple(sorted(probe["metrics"])),
        monitor=eye.monitor.summary(),
        peak_bytes=peak.bytes,
        probe=probe,
        schedule=schedule,
    )


def check_rate(found: Found, *, shortened: bool) -> None:
    """Raise if the baseline's learning rate allows no comparison.

    Args:
        found: the profile.
        shortened: whether the warm-up is searched.

    Raises:
        UsageError: for a module that steps its own optimizers, and does not decay their learning rate.
        Incomparable: for a learning rate that still rises in the second half of the budget.
    """
    if found.run.manual_optimization and not found.run.decayed_rate:
        raise UsageError(
            "The module steps its own optimizers (automatic_optimization=False), and its learning rate does not decay over the"
            f" budget ({found.why['decayed_rate']}). LearningRateSchedule cannot add a decay there. Decay the learning rate in"
            " the module, over trainer.estimated_stepping_batches."
        )
    if found.run.decayed_rate and not shortened:
        calibration.check_rate("baseline", found.rate, found.steps)


def _check_length(budget: float, step: float) -> None:
    """Raise :class:`Incomparable` if the budget holds too few steps. The message has a sufficient budget and search time."""
    try:
        calibration.check_length("baseline", budget, step)
    except Incomparable as error:
        least = math.ceil(calibration.FEWEST_STEPS * step)
        whole = Durations(least, step, 0.0, 0.0, 0.0, SEEDS, 1)
        trials, confirming = 2 * whole.trial((1 / 9, 1 / 3, 1)), whole.bench(LEAST)
        raise Incomparable(
            f"{error} With a budget of {least} s, a search takes at least {in_words(trials)} for trials of the baseline and a"
            f" recipe, and {in_words(confirming)} to confirm the recipe on {SEEDS} seeds. Set --search to"
            f" {math.ceil((trials + confirming) / 60)}m or more."
        ) from None


def _done(record: dict[str, Any]) -> dict[str, Any]:
    if record["status"] == "refused":
        raise Incomparable(record["error"])
    if record["status"] != "finished":
        raise RuntimeError(
            f"The baseline {record['status']} in its first steps, so there is nothing to tune: {record['error']}"
        )
    return record


def describe(found: Found) -> list[str]:
    """Return the profile as lines of text."""
    run = found.run
    phases = {name: seconds for name, seconds in found.monitor["phases"].items() if seconds}
    total = math.fsum(phases.values()) or 1.0
    shares = ", ".join(f"{name} {s / total:.0%}" for name, s in sorted(phases.items(), key=lambda kv: -kv[1]))
    memory = ", ".join(f"{n} {b / 2**20:.1f} MiB" for n, b in found.monitor["memory"].items() if b)
    lines = [f"{name}: {getattr(run, name)} ({why})" for name, why in found.why.items()]
    lines += [
        f"steps: {1000 * found.step_seconds:.3g} ms with {found.samples:g} samples each, {found.steps} in the budget",
        f"time: {shares}",
        f"memory: {memory}; peak {found.peak_bytes / 2**20:.0f} MiB",
    ]
    return lines
