"""What a run costs, for any run: speed, FLOPs, memory, seconds by phase and energy."""

import math
import time
from copy import copy
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both
from lightning_eff._core._run.metrics import CurrentMetrics
from lightning_eff.monitor import _counting as counting
from lightning_eff.monitor._cost import Prices, run_cost, unseen
from lightning_eff.monitor._phases import PHASES
from lightning_eff.monitor._table import rows
from lightning_eff.monitor._totals import Totals
from lightning_eff.monitor._watch import Watch
from lightning_eff.monitor.energy import EnergyMeter
from lightning_eff.monitor.machine import peak_memory, reset_peak_memory
from lightning_eff.monitor.peaks import Peak, measured_peak, peak_flops

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
_BUSY = "torch's ExecutionTraceObserver is in use, or its record cannot be read"
_MEMORY = ("parameters", "gradients", "optimizer", "activations")


@of_both
class EfficiencyMonitor(Callback):
    """Watches a fit of an unchanged module, with techniques or without, and tells what it cost.

    At the trainer's log interval it logs under ``eff/monitor/``, and as fit ends it prints on rank 0:

    - ``samples_per_second`` and ``tokens_per_second``, of all ranks: what the loader handed out over training time,
      without validation. A batch's tokens are those of its first 2-D integer tensor.
    - ``flops_per_second`` of one device, and ``mfu``, its share of the device's peak. The FLOPs of a kind of step (the
      shapes of the tensors that reach the user's ``training_step``, the blocks that run, what takes gradients) are
      those of one forward and one backward pass, from torch's record of the operators that run the first time it comes
      (``ExecutionTraceObserver``; while the user has one running, nothing is counted). Extra passes of techniques and what
      activation checkpointing computes again stand apart, in ``hardware_flops_per_second``. What changes inside the
      network from step to step while shapes stay (routing, sparsity) is not seen. Nothing is counted in a compiled
      module, whose kernels are no operators; those of compiled functions are left out, which is said.
    - ``parameters_bytes``, ``gradients_bytes``, ``optimizer_bytes`` and ``activations_bytes`` on this device, each at
      its largest: exact sizes of the tensors, tied ones once. Activations are what the graph holds as the backward pass
      begins: storages on this device, each once, without parameters, buffers and the batch. Where saved tensors are
      compressed, offloaded or computed again (by techniques, ``torch.utils.checkpoint`` or hooks of one's own), what is
      held in their place counts, and what waits in another device's memory does not. What custom functions in C++ keep
      is not seen. ``peak_bytes`` is the CUDA allocator's, else the process's resident set.
    - ``data_seconds``, ``forward_seconds``, ``backward_seconds`` (DDP's communication with it), ``optimizer_seconds``
      (clipping with it), ``extra_seconds`` (extra passes) and ``other_seconds`` (other callbacks, and the loop), with
      ``validation_seconds`` apart. On CUDA they are of the device's stream, by events that nothing waits for. In manual
      optimization a backward pass other than through ``manual_backward`` counts as forward.
    - ``energy_joules`` where the machine tells: the host's CPU packages by RAPL with all that runs on them, and this
      rank's GPU by NVML. ``co2_grams`` where ``co2_per_kwh`` says what they stand for.
    - ``cost``, so far and at the end, where prices are given: ``hours_cost`` for the time since this fit started on all
      its devices (validation with it), ``energy_cost`` for the energy. Where energy is not known, or the counters of
      this process do not see all devices of the run, ``cost`` lacks it, and the table says so.

    Steps in which FLOPs are counted are slower: their time stands apart (``counting_seconds``) and is in no rate. Losses
    and weights are bit for bit those without the monitor, beside every technique and plugin: operators are recorded and
    graphs are read, and nothing stands between. The peak of memory is reset as fit starts.

    Args:
        price_per_hour: of one device, such as a rented accelerator, >= 0, in any currency: a run on n devices pays n
            times that (of a machine rented as a whole, give its price divided by the processes on it). None tells none.
        price_per_kwh: of the electricity used, >= 0, in that currency. None tells none.
        co2_per_kwh: grams of CO2 for a kWh of the electricity used, >= 0; None tells no CO2.
        grid_g_per_kwh: the same, by its older name.
        peak: the device's peak in FLOP/s, > 0, in place of its data sheet's.
        measure_peak: measure the peak, by large matrix products in about 0.2 s as fit starts; for CPUs and devices of
            no known peak. ``peak`` and the data sheet go before it.
        max_counts: kinds of step to count FLOPs of, >= 0; FLOP/s are then those of the steps of these kinds.
        activations: count the bytes held for the backward pass.

    Raises:
        ValueError: for other values.
    """

    sparse_gradients: ClassVar[bool] = True  # it counts their bytes

    def __init__(
        self,
        *,
        price_per_hour: float | None = None,
        price_per_kwh: float | None = None,
        co2_per_kwh: float | None = None,
        grid_g_per_kwh: float | None = None,
        peak: float | None = None,
        measure_peak: bool = False,
        max_counts: int = 16,
        activations: bool = True,
    ) -> None:
        if grid_g_per_kwh is not None and not 0 <= grid_g_per_kwh < math.inf:
            raise ValueError(
                f"EfficiencyMonitor(grid_g_per_kwh={grid_g_per_kwh}): expected grams of CO2 per kWh, a finite number"
                " >= 0, or None. Grid operators publish theirs."
            )
        if grid_g_per_kwh is not None and co2_per_kwh is not None:
            raise ValueError(
                f"EfficiencyMonitor({co2_per_kwh=}, {grid_g_per_kwh=}): these are two names of one thing; expected one of"
                " them. Leave grid_g_per_kwh out."
            )
        self.prices = Prices(price_per_hour, price_per_kwh, grid_g_per_kwh if co2_per_kwh is None else co2_per_kwh)
        self.prices.check("EfficiencyMonitor")
        if peak is not None and not 0 < peak < math.inf:
            raise ValueError(
                f"EfficiencyMonitor(peak={peak}): expected FLOP/s, a finite number > 0 such as 312e12, or None for the"
                " data sheet's."
            )
        if isinstance(max_counts, bool) or not isinstance(max_counts, int) or max_counts < 0:
            raise ValueError(
                f"EfficiencyMonitor(max_counts={max_counts!r}): expected an integer >= 0, a number of kinds of step. 0"
                " counts no FLOPs and no activations."
            )
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
        self._logged = Totals()  # when loggers were told last
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
        """Whether this batch is one after which Lightning logs, or in which FLOPs were counted."""
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
        """Take everything out of the run again; what it told stays."""
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

    # -- what it tells

    def summary(self) -> dict[str, Any]:
        """The numbers of the run that goes on, or of the last one; None stands for what is not known.

        Rates are over steps that were not counted. ``phases`` holds seconds by phase, ``memory`` bytes by category.

        Raises:
            RuntimeError: before any run.
        """
        if self.watch is not None:
            return self._sum_up(self.watch, self.watch.trainer)
        if self._summary is None:
            raise RuntimeError("EfficiencyMonitor has watched no run yet; it tells of a fit that it was a callback of.")
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
        """For loggers and callbacks: rates since loggers were told last, all else since fit started."""
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
        """The closing table, a line for each thing."""
        lines = rows(self.prices, self.summary())
        width = max(len(name) for name, _ in lines)
        return "\n".join(["", "What this run cost", *(f"  {name:<{width}}  {value}" for name, value in lines), ""])


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 and amount else None
