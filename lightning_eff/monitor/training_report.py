"""Print a closing report when a run ends: tokens, speed, validation, memory, and a line per technique."""

import resource
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both
from lightning_eff._core._samples.counting import counting
from lightning_eff._core.batches import num_samples, num_tokens, tensors
from lightning_eff._core.progress import in_flight
from lightning_eff._core.technique import techniques_of
from lightning_eff.monitor._table import closing


@of_both
class TrainingReport(Callback):
    """Print a closing report on rank 0. The command line adds it to every fit.

    Tokens, or samples if a batch has no token ids, are those that the loader returned on all ranks. A resumed run continues
    the count from its checkpoint. Seconds are the training time since the start or the resume, without validation.
    """

    def __init__(self) -> None:
        self._counted = {"tokens": 0, "samples": 0, "uncounted_steps": 0}
        self._loaded = False
        self._begin(None)

    def _begin(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        self._before = dict(self._counted)
        self._latest: dict[str, int] = {}  # the counts of the current batch
        self._first = 0 if trainer is None else trainer.global_step
        self._batches = 0
        self._began = self._paused = self._outside = 0.0
        self._seconds = 0.0
        self._text = ""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._loaded:
            self._counted = {"tokens": 0, "samples": 0, "uncounted_steps": trainer.global_step}
        self._loaded = False
        self._begin(trainer)
        self._began = time.perf_counter()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        ranks = trainer.world_size
        with counting(trainer, tensors(batch)):
            self._latest = {"tokens": num_tokens(batch) * ranks, "samples": num_samples(batch) * ranks}
        for unit, amount in self._latest.items():
            self._counted[unit] += amount
        self._batches += 1

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._outside += time.perf_counter() - self._paused

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seconds = max(time.perf_counter() - self._began - self._outside, 1e-9)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._batches:
            self._text = self.text(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._text:  # after the progress bar, whose teardown comes first
            print(self._text, flush=True)
            self._text = ""
        self._trainer = None

    @override
    def state_dict(self) -> dict[str, Any]:
        again = self._latest if self._trainer is not None and in_flight(self._trainer) else {}
        return {name: count - again.get(name, 0) for name, count in self._counted.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._counted, self._loaded = dict(state_dict), True

    def text(self, trainer: Trainer, pl_module: LightningModule) -> str:
        """Return the report."""
        unit = "tokens" if self._counted["tokens"] else "samples"
        amount, steps = self._counted[unit], f"{trainer.global_step:,} steps"
        if uncounted := self._counted["uncounted_steps"]:
            steps = f"the last {trainer.global_step - uncounted:,} of {steps}"
        since = f" since step {self._first:,}" if self._first else ""
        rate = (amount - self._before[unit]) / self._seconds
        rows = [
            (f"{unit} seen", f"{amount:,} in {steps}"),
            (f"{unit}/s", f"{rate:,.0f} over {self._seconds:.1f} s of training{since}"),
        ]
        rows += [
            (name, f"{float(value):.4f}")
            for name, value in sorted(trainer.callback_metrics.items())
            if name.startswith("val") or ("/val" in name and not name.startswith("eff/"))
        ]
        rows.append(("peak memory", _peak_memory(pl_module.device)))
        techniques = techniques_of(trainer)
        rows += [
            (type(t).__name__, "neutral settings, plain training" if t.neutral else t.summary()) for t in techniques
        ]
        cost = techniques[0].session.chain.cost if techniques else None
        if cost is not None and (cost.forward_passes or cost.backward_passes):
            passes = f"{cost.forward_passes:,} forward, {cost.backward_passes:,} backward"
            rows.append(("extra passes", f"{passes}: {cost.seconds:.1f} s"))
        return closing("What this run did", rows)


def _peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB allocated on {torch.cuda.get_device_name(device)}"
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{peak / 2**20:,.0f} MiB resident, the whole process"
