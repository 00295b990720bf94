"""Measure what any run costs: speed, FLOPs, memory, time by phase, energy and money."""

import time
from copy import copy
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._lightning.names import of_both
from lightning_eff._core._run.metrics import CurrentMetrics
from lightning_eff.monitor import _counting as counting
from lightning_eff.monitor._cost import Price, Prices, run_cost, unseen
from lightning_eff.monitor._phases import PHASES
from lightning_eff.monitor._table import closing, rows
from lightning_eff.monitor._totals import Totals
from lightning_eff.monitor._watch import Watch
from lightning_eff.monitor.energy import EnergyMeter
from lightning_eff.monitor.machine import peak_memory, reset_peak_memory
from lightning_eff.monitor.peaks import Peak, measured_peak, peak_flops

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
_BUSY = "another ExecutionTraceObserver of torch is in use, or its record cannot be read"
_MEMORY = ("parameters", "gradients", "optimizer", "activations")


@of_both
class EfficiencyMonitor(Callback):
    """Measure the speed, FLOPs, memory, time by phase, energy and cost of a run.

    The module stays unchanged, with or without techniques. The monitor logs under ``eff/monitor/`` at the Trainer's log
    interval, and prints a table on rank 0 when fit ends. Use it to find out where time and memory go before you choose a
    technique. Losses and weights stay bit-identical. Only the steps in which FLOPs are counted are slower; their time is
    reported as ``counting_seconds`` and excluded from all speeds.

    It logs:

    - ``samples_per_second`` and ``tokens_per_second`` over all ranks, in training time without validation. A batch's tokens
      are the elements of its first 2-D integer tensor.
    - ``flops_per_second`` of one device, and ``mfu``, its fraction of the device's peak. FLOPs are those of one forward and
      one backward pass, counted once per kind of step from torch's record of operators (``ExecutionTraceObserver``). A kind
      is defined by the shapes of the batch, the blocks that run and the parameters that take gradients.
      ``hardware_flops_per_second`` adds the extra passes of techniques and recomputed activations.
    - ``parameters_bytes``, ``gradients_bytes``, ``optimizer_bytes`` and ``activations_bytes`` on this device, each at its
      largest. Tied tensors count once. Activations are the tensors that the graph holds when the backward pass begins,
      without parameters, buffers and the batch. Compressed, offloaded or recomputed activations count with the bytes that
      they occupy on this device. ``peak_bytes`` is the peak of the CUDA allocator, or else of the process's resident memory.
      The peak is reset when fit starts.
    - ``data_seconds``, ``forward_seconds``, ``backward_seconds`` (with DDP's communication), ``optimizer_seconds`` (with
      clipping), ``extra_seconds`` (extra passes), ``other_seconds`` (other callbacks and the loop) and
      ``validation_seconds``. On CUDA, they are measured with events on the device's stream, without synchronization.
    - ``energy_joules``, if the machine has counters: RAPL for the host's CPU packages with everything that runs on them, and
      NVML for this rank's GPU. ``co2_grams``, if ``co2_per_kwh`` is set.
    - ``hours_cost``, ``energy_cost`` and their sum ``cost``, if prices are set. Time is counted from the start of fit on all
      devices, with validation. If energy is unknown, or the counters of this process miss devices of the run, ``cost`` lacks
      it and the table says so.

    FLOPs are not counted in compiled modules, and not while another ``ExecutionTraceObserver`` runs. Compiled functions are
    left out and named. Changes inside the network at constant shapes, such as routing and sparsity, are not seen, nor are
    tensors that custom C++ functions keep. With manual optimization, a backward pass outside ``manual_backward`` counts as
    forward.

    Args:
        price_per_hour: the price of one device for an hour, in any currency. A run on n devices pays n times that. For a
            machine rented as a whole, divide its price by the number of processes on it.
        price_per_kwh: the price of a kWh of electricity, in the same currency.
        co2_per_kwh: the grams of CO2 per kWh of electricity. Grid operators publish theirs.
        grid_g_per_kwh: the older name of ``co2_per_kwh``.
        peak: the device's peak in FLOP/s, instead of the value in its data sheet.
        measure_peak: whether to measure the peak with large matrix products, for about 0.2 s at the start of fit. This is
            for CPUs and unlisted devices; ``peak`` and data sheets take precedence.
        max_counts: the largest number of kinds of step whose FLOPs are counted. FLOP/s cover these kinds. 0 counts no FLOPs
            and no activations.
        activations: whether to count the bytes held for the backward pass.

    Raises:
        ValueError: for a value out of range, or if both ``co2_per_kwh`` and ``grid_g_per_kwh`` are given.

    Example:
        >>> monitor = EfficiencyMonitor(price_per_hour=2.5)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[monitor])
    """

    sparse_gradients: ClassVar[bool] = True  # their bytes are counted

    @declared
    def __init__(
        self,
        *,
        price_per_hour: Price | None = None,
        price_per_kwh: Price | None = None,
        co2_per_kwh: Price | None = None,
        grid_g_per_kwh: Price | None = None,
        peak: Annotated[float, Number(above=0, hint="Write it in FLOP/s, such as 312e12.")] | None = None,
        measure_peak: bool = False,
        max_counts: Annotated[int, Count(at_least=0)] = 16,
        activations: bool = True,
    ) -> None:
        if grid_g_per_kwh is not None and co2_per_kwh is not None:
            raise ValueError(
                f"EfficiencyMonitor({co2_per_kwh=}, {grid_g_per_kwh=}): these are two names of one argument. Remove"
                " grid_g_per_kwh."
            )
        self.prices = Prices(price_per_hour, price_per_kwh, grid_g_per_kwh if co2_per_kwh is None else co2_per_kwh)
        self.peak = peak
        self.measure_peak = measure_peak
        self.max_counts = max_counts
        self.activations = activations
        self.watch: Watch | None = None
        self._current: CurrentMetrics | None = None
        self._summary: dict[str, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._energy: EnergyMeter | None = None
        self._energy_read = 0.0
        self._peak: Peak | None = None
        self._memory: dict[str, int] = {}
        self._peak_reset = False
        self._logged = Totals()  # totals at the last log
        self._first_step = 0
        self._began = time.perf_counter()

    # -- Lightning's hooks

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._summary = None
        self._first_step = trainer.global_step
        device = trainer.strategy.root_device
        self._peak = self._find_peak(str(trainer.precision), device)
        self._peak_reset = reset_peak_memory(device)
        self._energy = EnergyMeter(device)
        self._energy.start()
        self.watch = Watch(trainer, pl_module, max_counts=self.max_counts, activations=self.activations)
        self.watch.install()
        self._current = CurrentMetrics(trainer, self._metrics)

    def _find_peak(self, precision: str, device: torch.device) -> Peak | None:
        dtype = _DTYPES.get(precision.partition("-")[0])
        name = precision if dtype is None else str(dtype).removeprefix("torch.")
        if self.peak is not None:
            return Peak(self.peak, name, "given")
        known = peak_flops(device, dtype) if dtype is not None else None
        if known is None and self.measure_peak and dtype is not None:
            return measured_peak(device, dtype)
        return known

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.watch is not None and ("gradients" not in self._memory or self._due(trainer)):
            self._largest("gradients", [p.grad for p in pl_module.parameters() if p.grad is not None])

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        watch = self.watch
        if watch is None:
            return
        watch.batch(batch)
        if self._current is not None:
            self._current.outdate()
        if self._energy is not None and time.perf_counter() - self._energy_read > 1.0:
            self._energy.read()
            self._energy_read = time.perf_counter()
        if self._due(trainer):
            self._measure(trainer, pl_module)
            metrics = self._metrics()
            self._logged = copy(watch.totals)
            if trainer.logger is not None:
                pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def _due(self, trainer: Trainer) -> bool:
        """Return whether Lightning logs after this batch, or its FLOPs were counted."""
        assert self.watch is not None
        logs = trainer._logger_connector.should_update_logs or trainer.is_last_batch
        return logs or self.watch.counting_now or "parameters" not in self._memory

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        optimizers = [getattr(o, "_optimizer", o) for o in trainer.strategy.optimizers]
        self._largest("parameters", list(module.parameters()))
        self._largest("optimizer", counting.optimizer_tensors(optimizers))

    def _largest(self, name: str, tensors: list[torch.Tensor]) -> None:
        self._memory[name] = max(self._memory.get(name, 0), counting.tensor_bytes(tensors))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watch is not None:
            self._measure(trainer, pl_module)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watch is None:
            return
        self.watch.end()
        self._close(trainer)
        if trainer.is_global_zero and self._summary is not None and self._summary["batches"]:
            print(self.text(), flush=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer, failed=True)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    def _close(self, trainer: Trainer, *, failed: bool = False) -> None:
        """Remove all hooks from the run; logged metrics stay."""
        if self.watch is None:
            return
        if self._current is not None:
            self._current.remove(keep=not failed)
            self._current = None
        self.watch.remove()
        if self._energy is not None:
            self._energy.stop()
        self._summary = self._sum_up(self.watch, trainer)
        self.watch = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "watch": None, "_energy": None, "_current": None}

    # -- reports

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the current run, or of the last one; None marks unknown values.

        Speeds exclude the steps in which FLOPs were counted. ``phases`` holds seconds by phase, ``memory`` bytes by category.

        Raises:
            RuntimeError: before any run.
        """
        if self.watch is not None:
            return self._sum_up(self.watch, self.watch.trainer)
        if self._summary is None:
            raise RuntimeError(
                "EfficiencyMonitor: it has not watched a run yet. Add it to the Trainer's callbacks and call fit first."
            )
        return self._summary

    def _sum_up(self, watch: Watch, trainer: Trainer) -> dict[str, Any]:
        every, rated, known = watch.totals.every, watch.totals.rated, watch.totals.known
        seconds, world = watch.seconds, trainer.world_size
        flops = _rate(known.model, known.seconds)
        hardware = _rate(known.model + known.more, known.seconds)
        peak = self._peak.flops if self._peak is not None else None
        joules = self._energy.joules if self._energy is not None else None
        sources = self._energy.sources if self._energy is not None else []
        dark = unseen(sources, device=watch.device.type, processes=world, nodes=trainer.num_nodes)
        spent = time.perf_counter() - self._began
        memory = {name: self._memory.get(name) for name in _MEMORY}
        held = [k.activation_bytes for k in watch.kinds.values() if k.activation_bytes is not None]
        memory["activations"] = max(held, default=None)
        used = peak_memory(watch.device)
        return {
            "steps": trainer.global_step - self._first_step,
            "batches": every.batches * world,
            "samples": every.samples * world,
            "tokens": every.tokens * world,
            "samples_per_second": _rate(rated.samples * world, rated.seconds),
            "tokens_per_second": _rate(rated.tokens * world, rated.seconds) if every.tokens else None,
            "rated_seconds": rated.seconds,
            "flops": known.model,
            "extra_flops": known.more,
            "flops_batches": known.batches,
            "flops_unknown": watch.reason or (_BUSY if watch.busy and not watch.kinds else None),
            "flops_left_out": sorted(watch.unknown),
            "flops_per_second": flops,
            "hardware_flops_per_second": hardware,
            "mfu": None if flops is None or peak is None else flops / peak,
            "peak_flops": peak,
            "peak_dtype": None if self._peak is None else self._peak.dtype,
            "peak_source": None if self._peak is None else self._peak.source,
            "phases": {phase: seconds[phase] for phase in PHASES},
            "validation_seconds": seconds["validation"],
            "counted_batches": every.batches - rated.batches,
            "counting_seconds": seconds["counting"],
            "training_seconds": rated.seconds + seconds["counting"],
            "memory": memory,
            "peak_bytes": used.bytes,
            "peak_kind": used.kind,
            "peak_reset": self._peak_reset,
            "energy_joules": joules,
            "energy_sources": sources,
            **run_cost(self.prices, seconds=spent, devices=world, joules=joules, unseen=dark),
        }

    def _metrics(self) -> dict[str, float]:
        """Return the metrics: speeds since the last log, all else since fit started."""
        assert self.watch is not None
        now = self.summary()
        world = self.watch.trainer.world_size
        rated = self.watch.totals.rated.plus(self._logged.rated, -1)
        known = self.watch.totals.known.plus(self._logged.known, -1)
        flops = _rate(known.model, known.seconds)
        found: dict[str, float | None] = {
            "samples_per_second": _rate(rated.samples * world, rated.seconds),
            "tokens_per_second": _rate(rated.tokens * world, rated.seconds) if now["tokens"] else None,
            "flops_per_second": flops,
            "hardware_flops_per_second": _rate(known.model + known.more, known.seconds),
            "mfu": None if flops is None or self._peak is None else flops / self._peak.flops,
            **{f"{name}_bytes": value for name, value in now["memory"].items()},
            **{f"{phase}_seconds": value for phase, value in now["phases"].items()},
            **{name: now[name] for name in ("validation_seconds", "counting_seconds", "peak_bytes")},
            **{name: now[name] for name in ("energy_joules", "co2_grams", "hours_cost", "energy_cost", "cost")},
        }
        return {f"eff/monitor/{name}": float(value) for name, value in found.items() if value is not None}

    def text(self) -> str:
        """Return the closing table."""
        return closing("What this run cost", rows(self.prices, self.summary()))


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 and amount else None
