"""Efficient-training techniques for PyTorch Lightning, stacked onto an unchanged LightningModule."""

import typing as _typing
from importlib import import_module as _import_module

from lightning_eff import _lazy
from lightning_eff import _source_tree as _source_tree  # before all that imports lightning_eff.kernels

if _typing.TYPE_CHECKING:
    from lightning_eff.bench import Benchmark
    from lightning_eff.data.curriculum.sequence_length_warmup import SequenceLengthWarmup
    from lightning_eff.data.exact_resume import ExactResume
    from lightning_eff.data.selection.importance_sampling import ImportanceSampling
    from lightning_eff.data.selection.selective_backprop import SelectiveBackprop
    from lightning_eff.memory.act_precision import ACTPrecision
    from lightning_eff.memory.activation_compression import ActivationCompression
    from lightning_eff.memory.activation_offload import ActivationOffload
    from lightning_eff.memory.optimizer_offload import OptimizerOffload
    from lightning_eff.memory.rematerialization import Rematerialization
    from lightning_eff.model.growth.progressive_layer_dropping import ProgressiveLayerDropping
    from lightning_eff.model.growth.progressive_stacking import ProgressiveStacking
    from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
    from lightning_eff.optim.averaging.latest_weight_averaging import LatestWeightAveraging
    from lightning_eff.optim.optimizers.muon import Muon
    from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
    from lightning_eff.precision.fp8 import FP8Precision
    from lightning_eff.precision.int8 import INT8Precision
    from lightning_eff.precision.s2fp8 import S2FP8Precision
    from lightning_eff.precision.stochastic_rounding_bf16 import StochasticRoundingBF16
    from lightning_eff.precision.wang_2018_fp8 import Wang2018FP8Precision
    from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy
    from lightning_eff.strategies.deep_speed import DeepSpeedEffStrategy
    from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
    from lightning_eff.strategies.local_sgd import LocalSGD

__all__ = [
    "ACTPrecision",
    "ActivationCompression",
    "ActivationOffload",
    "Benchmark",
    "CompressedDDPStrategy",
    "DeepSpeedEffStrategy",
    "EfficiencyMonitor",
    "ExactResume",
    "FP8Precision",
    "HybridParallelStrategy",
    "INT8Precision",
    "ImportanceSampling",
    "LatestWeightAveraging",
    "LocalSGD",
    "Muon",
    "OptimizerOffload",
    "ProgressiveLayerDropping",
    "ProgressiveStacking",
    "Rematerialization",
    "S2FP8Precision",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
    "SharpnessAwareMinimization",
    "StochasticRoundingBF16",
    "Wang2018FP8Precision",
]

#: Where each of them is; it is imported when it is asked for.
_HOMES = {
    "ACTPrecision": "lightning_eff.memory.act_precision",
    "ActivationCompression": "lightning_eff.memory.activation_compression",
    "ActivationOffload": "lightning_eff.memory.activation_offload",
    "Benchmark": "lightning_eff.bench",
    "CompressedDDPStrategy": "lightning_eff.strategies.compressed_ddp",
    "DeepSpeedEffStrategy": "lightning_eff.strategies.deep_speed",
    "EfficiencyMonitor": "lightning_eff.monitor.efficiency_monitor",
    "ExactResume": "lightning_eff.data.exact_resume",
    "FP8Precision": "lightning_eff.precision.fp8",
    "HybridParallelStrategy": "lightning_eff.strategies.hybrid_parallel",
    "INT8Precision": "lightning_eff.precision.int8",
    "ImportanceSampling": "lightning_eff.data.selection.importance_sampling",
    "LatestWeightAveraging": "lightning_eff.optim.averaging.latest_weight_averaging",
    "LocalSGD": "lightning_eff.strategies.local_sgd",
    "Muon": "lightning_eff.optim.optimizers.muon",
    "OptimizerOffload": "lightning_eff.memory.optimizer_offload",
    "ProgressiveLayerDropping": "lightning_eff.model.growth.progressive_layer_dropping",
    "ProgressiveStacking": "lightning_eff.model.growth.progressive_stacking",
    "Rematerialization": "lightning_eff.memory.rematerialization",
    "S2FP8Precision": "lightning_eff.precision.s2fp8",
    "SelectiveBackprop": "lightning_eff.data.selection.selective_backprop",
    "SequenceLengthWarmup": "lightning_eff.data.curriculum.sequence_length_warmup",
    "SharpnessAwareMinimization": "lightning_eff.optim.sharpness.sharpness_aware_minimization",
    "StochasticRoundingBF16": "lightning_eff.precision.stochastic_rounding_bf16",
    "Wang2018FP8Precision": "lightning_eff.precision.wang_2018_fp8",
}
_FOLDERS = ("_core", "data", "kernels", "memory", "model", "monitor", "optim", "precision", "strategies")


def __getattr__(name: str) -> _typing.Any:
    """Import what is asked for: a training run needs few of the techniques, and the command line none to be told of a slip."""
    if name in _HOMES:
        found = getattr(_import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    if name in _FOLDERS:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_techniques() -> None:
    """A LightningCLI takes the classes that are imported by their names alone. The bench stays out."""
    for name, home in _HOMES.items():
        if home != "lightning_eff.bench":
            __getattr__(name)


_lazy.once_imported("lightning.pytorch.strategies", _lazy.register_strategies)
_lazy.once_imported("lightning.pytorch.cli", _import_techniques)
