"""Trials: exact techniques and settings, and those that change rounding or batches, each with its reason in this run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_eff._core._lightning.names import is_subclass
from lightning_eff._exports import public
from lightning_eff.advice._running.subject import Change, Subject, entry
from lightning_eff.advice.applied import Float32Products, FusedOptimizer, LargerBatch, LoaderWorkers, Unlogged
from lightning_eff.advice.fused_attention import FusedAttention
from lightning_eff.advice.intervals import BATCHES, EXACT, PRECISION
from lightning_eff.advice.looking import View
from lightning_eff.bench.arms import short

WAITING = 0.03  #: the fraction of the time, from which waiting for data is worth a trial
PADDING = 0.05  #: the fraction of positions, from which padding is
TUNING = 6  #: batches over which a trial's LoaderTuning measures a setting


@dataclass(frozen=True)
class Trial:
    """One thing to try.

    Attributes:
        name: unique, for people.
        change: in the configuration.
        kind: how it affects numbers at best: "exact", "rounding" or "other batches".
        reason: why it is tried here, with figures of this run.
        cost: what it costs.
        code: Python that does the same.
        recipe: whether a config can say it, so that it can stand in ``recipe.yaml``.
        unit: what its time counts: "sample" or "token".
        group: of trials of one group, a stack holds one.
        slow: its first step takes tens of seconds.
        late: it comes after all others, because it saves memory and not time.
        measured: the change that is measured, where it differs in how fast it settles.
    """

    name: str
    change: Change
    kind: str
    reason: str
    cost: str = "nothing"
    code: str = ""
    recipe: bool = True
    unit: str = "sample"
    group: str = ""
    slow: bool = False
    late: bool = False
    measured: Change | None = field(default=None, repr=False)

    @property
    def tried(self) -> Change:
        """The change that a trial makes."""
        return self.measured or self.change


def candidates(view: View, subject: Subject) -> tuple[list[Trial], dict[str, str]]:
    """The trials that could gain something on a run, the most promising first, and why the others could not."""
    left: dict[str, str] = {}
    found = [
        trial
        for part in (_data, _padding, _attention, _precision, _steps, _batches, _memory)
        for trial in part(view, subject, left)
    ]
    own = {name.split(".")[-1] for name in subject.callbacks}
    for trial in [t for t in found if own & set(t.change.classes)]:
        found.remove(trial)
        left[trial.name] = "the run has it already"
    return sorted(found, key=lambda trial: (trial.late, trial.slow)), left


def _technique(name: str, **arguments: Any) -> Change:
    cls = public.found(name)
    from lightning.pytorch.plugins import Precision

    return (
        Change(plugins=(entry(cls, **arguments),))
        if is_subclass(cls, Precision)
        else Change((entry(cls, **arguments),))
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _data(view: View, subject: Subject, left: dict[str, str]) -> Iterator[Trial]:
    if view.waiting < WAITING:
        left["LoaderTuning"] = f"a step waits for data for {view.waiting:.1%} of its time"
        return
    reason = f"a step waits for data for {view.waiting:.0%} of its time, with num_workers={view.loader['workers']}"
    yield Trial(
        "LoaderTuning",
        _technique("LoaderTuning"),
        EXACT,
        reason,
        cost="worker processes, and their memory",
        code="callbacks=[LoaderTuning()]",
        group="loader",
        measured=_technique("LoaderTuning", num_batches=TUNING, max_prefetch=4),
    )
    workers = min(max(_cores(), 2), 8)
    if not view.loader["plain"]:
        left["num_workers"] = (
            f"the training loader cannot be built again: {view.loader['why'] or 'it is none of torch'}"
        )
    elif (view.loader["workers"] or 0) >= workers:
        left["num_workers"] = f"the loader has {view.loader['workers']} workers, for {_cores()} cores"
    else:
        yield Trial(
            f"num_workers={workers}",
            Change((entry(LoaderWorkers, num_workers=workers),)),
            EXACT,
            reason,
            cost="worker processes, and their memory",
            code=f"DataLoader(..., num_workers={workers}, persistent_workers=True)",
            group="loader",
        )


def _padding(view: View, subject: Subject, left: dict[str, str]) -> Iterator[Trial]:
    if view.padding is None or view.padding < PADDING:
        why = (
            "batches have no mask of padding"
            if view.padding is None
            else f"{view.padding:.1%} of positions are padding"
        )
        left.update({"SequencePacking": why, "TokenBudgetBatches": why})
        return
    reason = f"{view.padding:.0%} of the positions in a batch are padding"
    yield Trial("SequencePacking", _technique("SequencePacking"), EXACT, reason, code="callbacks=[SequencePacking()]")
    budget = view.run.batch_size * (view.run.sequence_length or 1)
    yield Trial(
        "TokenBudgetBatches",
        _technique("TokenBudgetBatches", max_tokens=budget),
        BATCHES,
        reason,
        cost="batches hold samples of similar length, and differ in size",
        code=f"callbacks=[TokenBudgetBatches(max_tokens={budget})]",
        unit="token",
    )


def _attention(view: View, subject: Subject, left: dict[str, str]) -> Iterator[Trial]:
    if view.by_hand:
        places = ", ".join(short(place) for place in view.by_hand[:3])
        yield Trial(
            "FusedAttention",
            Change((entry(FusedAttention),)),
            EXACT,
            f"attention is computed by hand at {places}",
            code="F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)",
        )
    else:
        left["FusedAttention"] = "no attention is computed by hand"
    if view.run.memory_bound and view.run.sequence_length is not None:
        yield Trial(
            "MemoryEfficientAttention",
            _technique("MemoryEfficientAttention"),
            EXACT,
            view.why["memory_bound"],
            code="callbacks=[MemoryEfficientAttention()]",
            late=True,
        )
    else:
        left["MemoryEfficientAttention"] = "memory does not limit this run"


def _steps(view: View, subject: Subject, left: dict[str, str]) -> Iterator[Trial]:
    optimizers = ", ".join(dict.fromkeys(view.optimizers["names"]))
    for kind in ("fused", "foreach"):
        if (why := view.optimizers[kind]) or view.optimizers[f"is_{kind}"]:
            left[f"{kind} optimizer"] = f"{why[0]}" if why else f"{optimizers} runs so already"
            continue
        yield Trial(
            f"{kind} optimizer",
            Change((entry(FusedOptimizer, kind=kind),)),
            EXACT,
            f"{optimizers} does not run with {kind}=True",
            code=f"{optimizers.partition(',')[0]}(..., {kind}=True)",
            group="optimizer",
        )
    if view.layers["convolutions"]:
        reason = f"the model has {view.layers['convolutions']} convolutions"
        yield Trial("ChannelsLast", _technique("ChannelsLast"), EXACT, reason, code="callbacks=[ChannelsLast()]")
    else:
        left["ChannelsLast"] = "the model has no convolutions"
    if view.run.sequence_length is None:
        left["FusedLinearCrossEntropy"] = "samples are no token sequences"
    else:
        yield Trial(
            "FusedLinearCrossEntropy",
            _technique("FusedLinearCrossEntropy"),
            EXACT,
            f"samples are sequences of {view.run.sequence_length} tokens",
            code="callbacks=[FusedLinearCrossEntropy()]",
        )
    if not view.layers["norms"]:
        left["FusedNorms"] = "the model has no LayerNorm or RMSNorm"
    else:
        reason = f"the model has {view.layers['norms']} norms"
        yield Trial("FusedNorms", _technique("FusedNorms"), EXACT, reason, code="callbacks=[FusedNorms()]")
    if view.logs >= 1:
        yield Trial(
            "less logging",
            Change((entry(Unlogged),)),
            EXACT,
            f"training_step calls self.log {view.logs:.0f} times per batch",
            cost="fewer logged values",
            code="if self.global_step % 50 == 0: self.log(...)",
            recipe=False,
        )
    if subject.settings.get("detect_anomaly"):
        yield Trial(
            "detect_anomaly=False",
            Change(trainer={"detect_anomaly": False}),
            EXACT,
            "the Trainer has detect_anomaly=True",
            code="Trainer(detect_anomaly=False)",
        )
    if view.run.num_blocks < 2:
        left["RegionalCompilation"] = "the model has no stack of repeated blocks"
    else:
        yield Trial(
            "RegionalCompilation",
            _technique("RegionalCompilation"),
            EXACT,
            f"the model has {view.run.num_blocks} equal blocks",
            code="callbacks=[RegionalCompilation()]",
            slow=True,
        )


def _precision(view: View, subject: Subject, left: dict[str, str]) -> Iterator[Trial]:
    names = ("bf16-mixed", "StochasticRoundingBF16", "FP8Precision", "TF32")
    if subject.precision != "32-true":
        left.update(dict.fromkeys(names, f"the run has precision {subject.precision} already"))
        return
    cuda = view.run.accelerator == "cuda"
    rounding = "the loss and gradients are rounded"
    yield Trial(
        "bf16-mixed",
        Change(trainer={"precision": "bf16-mixed"}),
        PRECISION,
        "the run computes in float32",
        cost=rounding,
        code='Trainer(precision="bf16-mixed")',
        group="precision",
    )
    yield Trial(
        "StochasticRoundingBF16",
        _technique("StochasticRoundingBF16"),
        PRECISION,
        "the run computes in float32",
        cost="weights are stored in bfloat16",
        code="Trainer(plugins=[StochasticRoundingBF16()])",
        group="precision",
    )
    if view.run.float8 and view.layers["linear"]:
        yield Trial(
            "FP8Precision",
            _technique("FP8Precision", base="bf16-mixed"),
            PRECISION,
            f"the GPU has FP8 matrix units, and the model has {view.layers['linear']} linear layers",
            cost="linear layers round to 8 bits",
            code='Trainer(plugins=[FP8Precision(base="bf16-mixed")])',
            group="precision",
        )
    else:
        left["FP8Precision"] = (
            "the device has no FP8 matrix units" if view.layers["linear"] else "there is no linear layer"
        )
    if not cuda:
        left["TF32"] = "only GPUs have TF32"
    elif torch.get_float32_matmul_precision() != "highest":
        left["TF32"] = "the run uses it already"
    else:
        yield Trial(
            "TF32",
            Change((entry(Float32Products, precision="high"),)),
            PRECISION,
            "matrix products run in full float32",
            cost="matrix products round to 10 bits",
            code='torch.set_float32_matmul_precision("high")',
            group="precision",
        )


def _batches(view: View, subject: Subject, left: dict[str, str]) -> Iterator[Trial]:
    size, window = view.loader["batch_size"], int(subject.settings.get("accumulate_grad_batches", 1))
    if not view.loader["plain"] or not size:
        left["larger batches"] = (
            f"the training loader cannot be built again: {view.loader['why'] or 'it is none of torch'}"
        )
        return
    length = view.loader["length"]
    if window > 1:
        yield Trial(
            f"batch of {size * window}, no accumulation",
            Change((entry(LargerBatch, factor=window),), trainer={"accumulate_grad_batches": 1}),
            EXACT,
            f"the Trainer accumulates {window} batches of {size}",
            cost="memory for the activations of the larger batch",
            code=f"DataLoader(..., batch_size={size * window}) and Trainer(accumulate_grad_batches=1)",
        )
    for factor in (2, 4):
        if length is not None and length < 2 * factor:
            left[f"batch of {size * factor}"] = f"an epoch has {length} batches"
            continue
        yield Trial(
            f"batch of {size * factor}",
            Change((entry(LargerBatch, factor=factor),)),
            BATCHES,
            f"batches have {size} samples",
            cost="fewer optimizer steps per epoch, so the learning rate must be tuned again; memory",
            code=f"DataLoader(..., batch_size={size * factor})",
            recipe=False,
            group="batch",
        )


def _memory(view: View, subject: Subject, left: dict[str, str]) -> Iterator[Trial]:
    if view.run.num_blocks < 1:
        left["Rematerialization"] = "the model has no stack of repeated blocks"
    else:
        yield Trial(
            "Rematerialization",
            _technique("Rematerialization"),
            EXACT,
            f"activations of {view.run.num_blocks} blocks could be computed again instead of stored",
            cost="one more forward pass",
            code="callbacks=[Rematerialization()]",
            late=True,
        )
    if not view.run.optimizer_states:
        left["EightBitOptimizer"] = "the optimizer has no states"
    elif not (view.run.memory_bound or view.run.accelerator == "cuda"):
        left["EightBitOptimizer"] = "memory does not limit this run"
    else:
        yield Trial(
            "EightBitOptimizer",
            _technique("EightBitOptimizer"),
            PRECISION,
            "the optimizer keeps states for each parameter",
            cost="optimizer states round to 8 bits",
            code="callbacks=[EightBitOptimizer()]",
            late=True,
        )
