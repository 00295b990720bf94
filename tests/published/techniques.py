"""The techniques that every published package is tried with, at least one of each kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning_eff as eff


@dataclass(frozen=True)
class Tried:
    """One technique, with settings that act on a small module within twelve steps.

    Attributes:
        build: builds the callback, or the precision plugin.
        kind: the kind of technique, as the page calls it.
        plugin: whether it is a precision plugin, which goes into ``plugins=``.
        exact: whether the trained weights must be those of plain Lightning, bit for bit.
        close: whether it is exact but for rounding.
        architecture: whether it changes the parameters, so that checkpoints load into ``apply(plain, technique)``.
        beside: whether its runs resume in mid-epoch only beside ``ExactResume``, as the contract says of plugins.
        anywhere: whether every module has what it acts on, so that a refusal is always wrong.
    """

    build: Callable[[], Any]
    kind: str
    plugin: bool = False
    exact: bool = False
    close: bool = False
    architecture: bool = False
    beside: bool = False
    anywhere: bool = False


TRIED: dict[str, Tried] = {
    "ExactResume": Tried(eff.ExactResume, "resuming", exact=True, anywhere=True),
    "EfficiencyMonitor": Tried(eff.EfficiencyMonitor, "monitor", exact=True, beside=True, anywhere=True),
    "GradientNoiseScale": Tried(lambda: eff.GradientNoiseScale(half_life=5), "noise scale", exact=True),
    "ReplaceOptimizer": Tried(lambda: eff.ReplaceOptimizer("lightning_eff.Adan", lr=1e-3), "optimizer", anywhere=True),
    "ReplaceOptimizer(Muon)": Tried(lambda: eff.ReplaceOptimizer("lightning_eff.Muon", lr=1e-2), "optimizer"),
    "EightBitOptimizer": Tried(lambda: eff.EightBitOptimizer(min_size=48), "8-bit optimizer"),
    "LearningRateSchedule": Tried(
        lambda: eff.LearningRateSchedule("wsd", warmup=0.2, decay=0.5), "schedule", anywhere=True
    ),
    "BatchSizeWarmup": Tried(lambda: eff.BatchSizeWarmup(1, 0.4, full=2), "batch size"),
    "ExponentialMovingAverage": Tried(lambda: eff.ExponentialMovingAverage(3.0, tail=0.75), "averaging", anywhere=True),
    "StochasticWeightAveraging": Tried(
        lambda: eff.StochasticWeightAveraging(start=0.5, cycle=2, low=0.1, rate=0.8), "averaging"
    ),
    "SharpnessAwareMinimization": Tried(lambda: eff.SharpnessAwareMinimization(rho=0.1), "sharpness"),
    "ProgressiveStacking": Tried(lambda: eff.ProgressiveStacking(stages=[(0.0, 1), (0.5, 2)]), "growth"),
    "StochasticDepth": Tried(lambda: eff.StochasticDepth(drop=0.7), "layer dropping"),
    "LayerFreezing": Tried(lambda: eff.LayerFreezing(start=0.1, end=0.8), "freezing"),
    "LoRA": Tried(lambda: eff.LoRA(rank=2), "adapters", architecture=True),
    "LayerScale": Tried(eff.LayerScale, "initialization", architecture=True),
    "OrthogonalInit": Tried(eff.OrthogonalInit, "initialization"),
    "RMSNormalization": Tried(eff.RMSNormalization, "layers", architecture=True),
    "SwapActivation": Tried(lambda: eff.SwapActivation("relu2"), "layers", architecture=True),
    "RigL": Tried(lambda: eff.RigL(sparsity=0.5, interval=2), "sparsity"),
    "SelectiveBackprop": Tried(lambda: eff.SelectiveBackprop(keep=0.5, history=16), "selection"),
    "DataPruning": Tried(lambda: eff.DataPruning("grand", 0.5), "selection"),
    "DifficultyPacing": Tried(lambda: eff.DifficultyPacing("loss", 0.5, 0.75), "curriculum"),
    "Mixup": Tried(lambda: eff.Mixup(alpha=1.0), "augmentation"),
    "LabelSmoothing": Tried(eff.LabelSmoothing, "augmentation"),
    "Rematerialization": Tried(lambda: eff.Rematerialization(policy="full"), "memory", exact=True, close=True),
    "ActivationCompression": Tried(lambda: eff.ActivationCompression(bits=2), "memory"),
    "StochasticRoundingBF16": Tried(eff.StochasticRoundingBF16, "precision", plugin=True, beside=True),
    "INT8Precision": Tried(eff.INT8Precision, "precision", plugin=True, beside=True),
}
